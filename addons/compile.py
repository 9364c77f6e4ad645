"""Compile the model, forward and backward, or the whole training step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.addon import AddOnBase, replaces
from zae.common import argument_checks, optim, torch_private
from zae.common.walk import tensors_in
from zae.compiling import compiler, fused, graphs, kernels
from zae.compiling.benchmark import Benchmark
from zae.errors import ConfigError
from zae.loop.step_output import read_output

__all__ = ["CompileAddon"]

_log = logging.getLogger("zae")
_REMEDY = "write compile_mode='model', which does"


class CompileAddon(AddOnBase):
    """Compile the training step, and run eagerly what the compiled step does not cover.

    One shape is compiled: that of the first full batch. A batch of another shape (the short one at an epoch's end) runs
    eagerly instead of being compiled, and so do evaluation, a step while a parameter has a hook, and all steps once the
    compiler refuses the step (it cannot trace a branch on ``.item()``, ``print`` or an LSTM); a warning says why. The
    module itself is not changed, and a checkpoint has its keys: a run can resume from it with or without this add-on.
    Compiled and eager arithmetic differ in the last bits. Two runs in a fixed mode agree bitwise; "auto" decides by
    measured time.

    Parameters
    ----------
    compile_mode : {"auto", "graph", "fused", "model"}
        "graph" compiles ``train_step`` and its gradient as one graph, and on the CPU steps SGD, Adam and AdamW with
        their fused kernels, unless they were made with ``fused`` or ``foreach``, or of weights in half precision.

        "fused" compiles the whole step, on a CPU: forward, loss, backward, clip, the check for NaN, and the update of
        SGD, Adam or AdamW, which is skipped where ``on_nonfinite`` says so. There is no ``.grad`` then: an add-on that
        reads it between the gradient and the step is refused by name. An optimizer's first step is eager, because it
        creates the optimizer's state.

        "model" compiles only the model: it supports several ranks and several optimizers, and is rarely faster on a
        CPU.

        "auto" times the eager step, "graph" and, where the step allows it, "fused", in turn, and keeps the fastest; a
        tie keeps the eager step.
    compile_backend : str or callable
        A backend of ``torch.compile``; "aot_eager" only traces, for debugging.
    compile_options : mapping of str, optional
        Options of the backend "inductor", as ``torch.compile(options=...)`` takes them: ``{"max_autotune": True}``.
    fallback_random : bool
        With the backend "inductor", draw the same random numbers as the eager step.

    Attributes
    ----------
    compile_report : dict
        "kept" ("eager", "graph", "fused", "model", or "auto" during the benchmark), "reason" when the step was refused,
        "compile_seconds", "graphs", "eager_batches" (of another shape, or with a hook); with "auto", "not_fused" (why
        "fused" was not tried), the "seconds" of a step of each kind, and "breakeven_steps", after how many steps
        compiling has paid off (None: never).

    Raises
    ------
    ConfigError
        The mode, the backend or an option is unknown, or torch is too old for a graph; and before the first step, for
        what a graph does not support: several ranks, several optimizers, a float16 loss scale, hooks of gradients, an
        overridden ``backward``; with "fused" also BatchNorm's statistics, windows of several batches, other optimizers,
        hooks of their step, and add-ons that act on gradients. With "auto" such a run is eager, with a warning that
        says why.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import CompileAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(CompileAddon)(
    ...     model, "cpu", optimizer=optimizer, compile_mode="graph", compile_backend="aot_eager")
    >>> trainer.run(1, [torch.ones(4, 2)] * 3)["step"], trainer.compile_report["kept"]
    (3, 'graph')
    """

    layer = "model"
    slot = "compile"
    process_attributes = {
        "_compiled": {}, "_to_copy": set(), "_settings": {}, "_eager": None, "_update": None, "_made": None,
    }  # fmt: skip

    def __init__(
        self,
        *args: Any,
        compile_mode: str = "auto",
        compile_backend: str = "inductor",
        compile_options: Mapping[str, Any] | None = None,
        fallback_random: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        compiler.check_compiler(compile_mode, compile_backend)
        self.compile_mode, self.compile_backend = compile_mode, compile_backend
        self.compile_options = compiler.check_options(compile_options, compile_mode, compile_backend)
        (self.fallback_random,) = argument_checks.check_flags(fallback_random=fallback_random)
        self.compile_report: dict[str, Any] = {}
        self._compiled: dict[str, Any] = {}
        self._eager: Any = None
        self._looked = False
        self._settings: Mapping[str, Any] = {}  # Of the compiler, during a run.
        self._full: tuple[int | None, int] = (None, 0)  # Samples of a full batch, and batches of an epoch, where known.
        self._shapes: Any = None  # Of the compiled batches in this run; and of those in the report.
        self._reported: Any = None
        self._to_copy: set[int] = set()  # The indices of gradients that a graph returns and that must be copied.
        self._not_fused: str | None = ""  # Why the benchmark is without the whole step.
        self._benchmark = Benchmark(())
        self._to_fuse: list[Optimizer] = []
        self._update: fused.Update | None = None  # Of the optimizer, for a graph of the whole step.
        self._made: Any = None  # What the graph of the whole step returned, until the loop has used it.
        self._way = ""  # How this window is computed; "" is eagerly, and not timed.

    def setup(self) -> None:
        """Check what the graph supports; it is compiled with the first full batch."""
        super().setup()
        self._shapes, self._made, self._update, self._looked = None, None, None, False
        if not self.compile_report:
            self._begin_report()
        alone = self.compile_mode == "model"
        reason = None if alone else graphs.why_not(self, CompileAddon)
        if reason is not None:
            self._refuse(f"{reason}; {_REMEDY}")
        elif compiler.is_off():
            self._give_up("torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or its stance)")
        else:
            compiler.release_settings(self._settings)  # Of a setup without a teardown.
            self._settings = compiler.acquire_settings(compiler.GUARDS if alone else compiler.TRACES)

    def wrap_model(self, model: nn.Module) -> Any:
        """Note the module whose calls are compiled, in the mode "model"."""
        self._eager = super().wrap_model(model)
        return self._eager

    @property
    def _is_eager(self) -> bool:
        """Whether every step is eager: a graph was refused, or is not faster for the batches of this run."""
        decided = self._shapes is not None or not self._settings
        return self.compile_report.get("kept") == "eager" and decided

    def teardown(self) -> None:
        """Restore the compiler's settings."""
        self._release_settings()
        self._eager = None
        super().teardown()

    def plan_lines(self, plan: Any) -> list[str]:
        """Do not suggest a fused kernel where the step uses it anyway."""
        graphed = self.compile_mode != "model" and self.compile_report.get("kept") != "eager"
        if graphed and [each.type for each in self.devices] == ["cpu"] and len(optim.as_dict(self.optimizer)) == 1:
            plan.kernels = {name: text for name, text in plan.kernels.items() if name not in kernels.WITH_KERNEL}
        return super().plan_lines(plan)

    # -------------------------------------------------------------------------------------- gradients

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Note the size of a full batch."""
        if training:
            self._full = graphs.full_batch(loader, self.data_size)
            self._looked = False  # Other add-ons may be idle than in the last epoch.
        return super().wrap_loader(loader, training)

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Choose how to compute this window: eagerly, with a graph of the gradient, or with one of the whole step."""
        if not self._looked:
            self._look()
        self._way, self._made = self.compile_report["kept"], None
        if self._way == "auto":  # During the benchmark, in turn.
            self._way = self._benchmark.start(self.device)
        return super().gradients(batch)

    def _look(self) -> None:
        """Check, in each epoch, what a graph cannot do for the add-ons that are not idle."""
        self._looked, alone = True, self.compile_mode == "model"
        self._to_fuse = [o for o in self.optimizers.values() if kernels.is_fusible(o) and not alone]
        if not self._settings or self.compile_report["kept"] in ("eager", "model"):
            return
        if getattr(self, "scaler", None) is not None:  # The precision is decided in setup.
            self._refuse(f"a float16 loss scale; {_REMEDY}")
            return
        reason = fused.why_not(self) if self.compile_mode in ("auto", "fused") else ""
        if reason is None:
            self._update = self._update or fused.Update(next(iter(self.optimizers.values())))
        elif self.compile_mode == "fused" and self._update is not None:
            self._give_up(f"a graph does not support {reason}")
        elif self.compile_mode == "fused":
            self._refuse(f"{reason}; write compile_mode='graph', which does")
        if reason != self._not_fused and self.compile_report["kept"] != "eager":
            self._not_fused = reason
            self._begin_report()

    @replaces
    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Compute a batch of the compiled shape with a graph, of the gradient or of the whole step."""
        if not self._is_due(batch, count):
            return super().micro_step(batch, count)
        if self.compile_mode == "model":
            with torch_private.call_instead(self._eager, partial(self._call_compiled, "model")):
                return super().micro_step(batch, count)
        held = self.optimization.clipped_parameters[0] if self._way == "fused" else self.parameters
        parameters = [p for p in held if p.requires_grad]
        out = self._in_graph(batch, count, parameters)
        if out is not None:
            return read_output(out, batch, self.sample_weight, type(self), self.mode, self.count_targets)
        eager = super().micro_step(batch, count)
        if self._update is not None:
            self._update.note(parameters)
        return eager

    def _is_due(self, batch: Any, count: int) -> bool:
        """Return whether a micro-batch is computed by a graph."""
        if self._is_eager:
            return False
        shapes = (graphs.shapes_of(batch), count)
        if self._shapes is None:
            # The same shape in a resumed run, which may begin with the short batch. A lazy layer draws its weights from
            # the random stream, which the compiler would restore.
            full = graphs.is_full(batch, *self._full, self.progress_checker.epoch_batch, count)
            full = full and not optim.has_lazy(self.parameters)
            if full and count == getattr(self, "batches_per_step", count):
                self._shapes = shapes
                if self._reported not in (None, shapes):
                    self._begin_report()
                self._reported = shapes
        if shapes != self._shapes:
            self._pass_over()
        return self._way not in ("", "eager") and self.compile_report["kept"] != "eager"

    def _pass_over(self) -> None:
        """Count an eager batch; a window with one is not timed."""
        self._way = ""
        self.compile_report["eager_batches"] += 1

    def _begin_report(self) -> None:
        self._benchmark = Benchmark(["eager", "graph"] if self._not_fused else ["eager", "graph", "fused"])
        self.compile_report = {"kept": self.compile_mode, "compile_seconds": 0.0, "graphs": 0, "eager_batches": 0}
        if self._not_fused:
            self.compile_report["not_fused"] = self._not_fused

    def _in_graph(self, batch: Any, count: int, parameters: list[Tensor]) -> dict[str, Any] | None:
        """Compute a micro-batch with a graph; return None where it must be eager."""
        whole = self._way == "fused"
        has_hooks = any(map(torch_private.has_gradient_hooks, parameters))
        if has_hooks or (whole and (count > 1 or any(map(torch_private.has_step_hooks, self.optimizers.values())))):
            self._pass_over()
            return None
        before = self.compile_report["graphs"]
        try:
            with self.forward_context():
                if whole:
                    return self._whole(batch, parameters)
                out, gradients = self._call_compiled("graph", batch, count, parameters)
        except compiler.refusals() as error:  # Raised before anything is computed.
            self._give_up(compiler.reason_of(error))
            return None
        if self.compile_report["graphs"] != before:
            self._to_copy |= graphs.shared_gradients(parameters, gradients, list(tensors_in((batch, out))))
        graphs.add_gradients(parameters, gradients, self._to_copy)
        return cast("dict[str, Any]", out)

    def _whole(self, batch: Any, parameters: list[Tensor]) -> dict[str, Any] | None:
        """Make the whole step in one graph; return None where the optimizer has no state yet."""
        assert self._update is not None
        arguments = self._update.arguments(parameters)
        if arguments is None:
            self._pass_over()
            return None
        out, *self._made = self._call_compiled("fused", batch, parameters, *arguments)
        return cast("dict[str, Any]", out)

    def _with_step(self, batch: Any, parameters: list[Tensor], settings: Tensor, states: Any) -> Any:
        """Compute the whole step; compiled by "fused". The weights stay where the loop would raise or skip."""
        assert self._update is not None
        out, gradients = self._with_gradients(batch, 1, parameters)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            norm, gradients = fused.clip(gradients, self.gradient_clip)
            allowed = None if self.nonfinite.policy == "warn" else fused.is_finite(out["loss"], norm)
            stepped = fused.update(self._update.layout, parameters, gradients, settings, states, allowed)
        return out, norm, stepped

    def _with_gradients(self, batch: Any, count: int, parameters: list[Tensor]) -> tuple[dict[str, Any], Any]:
        """Compute the step and its gradient, scaled for the window; compiled by "graph"."""
        out: Any = self.train_step(batch)
        if isinstance(out, Tensor) and out.numel() == 1:
            out = {"loss": out}
        if not isinstance(out, Mapping):
            raise TypeError  # The compiler refuses the step, and the eager step raises a better error.
        with torch.autocast(self.device.type, enabled=False):  # As in a manual loop: backward is outside of autocast.
            loss = self.scale_loss(out["loss"], self.count_targets(out, batch), count)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {key: graphs.detach(value) for key, value in out.items()}, gradients

    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, past the function that the compiled call replaces."""
        return torch_private.call_of(self._eager)(*args, **kwargs)

    def _call_compiled(self, what: str, *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function, and count the graphs that are made for it."""
        compiled = self._compiled.get(what) or self._compile(what)
        before, start = torch_private.compiled_graphs(), time.perf_counter()
        result = compiled(*args, **kwargs)
        made = torch_private.compiled_graphs() - before
        if made > 0:
            self.compile_report["graphs"] += made
            self.compile_report["compile_seconds"] += time.perf_counter() - start
        return result

    def _compile(self, what: str) -> Any:
        functions: dict[str, Callable[..., Any]] = {
            "model": self._call_module, "graph": self._with_gradients, "fused": self._with_step,
        }  # fmt: skip
        options = compiler.options_of(self.compile_backend, self.fallback_random, self.compile_options)
        compiled = self._compiled[what] = torch.compile(functions[what], fullgraph=what != "model", **options)
        return compiled

    # -------------------------------------------------------------------------------- the optimizer, and the benchmark

    def clip(self) -> None:
        """Clip, or take the norm from the graph that has clipped."""
        if self._made is None:
            super().clip()
        elif self.gradient_clip:
            self.grad_norm = self._made[0]

    def optimizer_step(self) -> bool:
        """Step, unless the graph has; after a graph of the gradient, with the fused kernel."""
        if self._made is not None and self._update is not None:
            self._update.advance(self._made[1])
            stepped = True
        else:
            graphed = self._way != "eager" and self.compile_report["kept"] != "eager"
            with kernels.fused_kernels(self._to_fuse if graphed else ()):
                stepped = super().optimizer_step()
        if self._way and self.compile_report["kept"] == "auto":
            self._benchmark.stop(self._way, self.device, self.compile_report)
        return stepped

    def _release_settings(self) -> None:
        compiler.release_settings(self._settings)
        self._settings = {}

    def _refuse(self, reason: str) -> None:
        """Raise for what a graph cannot do; with "auto", run eagerly."""
        if self.compile_mode != "auto":
            raise ConfigError(f"compile_mode={self.compile_mode!r} does not support {reason}")
        self._release_settings()
        self._give_up(f"a graph does not support {reason}")

    def _give_up(self, reason: str) -> None:
        """Run eagerly from now on; during the benchmark, only without what was refused."""
        if self._way == "fused" and self.compile_report["kept"] == "auto":
            self._benchmark.remove("fused")
            self._way = ""
            self.compile_report["not_fused"] = reason
            return
        self.compile_report |= {"kept": "eager", "reason": reason}
        if self.is_main:
            _log.warning("the step runs eagerly: %s", reason)
