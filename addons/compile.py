"""Compiled training steps: the model, or forward, loss and backward as one graph, where that is faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zae import optim
from zae.addon import AddOnBase, replaces
from zae.addons import graphs
from zae.device import leading_dimension
from zae.errors import ConfigError, did_you_mean
from zae.explain import owners_of
from zae.seams import slots_of

__all__ = ["CompileAddon"]

_log = logging.getLogger("zae")
_MODES = ("auto", "graph", "fused", "model")
_REMEDY = "write compile_mode='model', which can"
_SCALED = f"a float16 loss scale; {_REMEDY}"


class CompileAddon(AddOnBase):
    """Compile the training step, and run eagerly whatever the compiled one was not made for.

    One shape is compiled: that of the first full batch. A batch of any other (the short one at an epoch's end) runs
    eagerly instead of being compiled again, and so does evaluation, a step while a parameter has a hook, and
    everything once the compiler refuses the step (it cannot follow ``.item()``, ``print`` or an LSTM into a graph); a
    warning says why. The module that was given stays as it is, and a checkpoint has its keys: a run goes on from it
    with or without this add-on. Compiled and eager arithmetic differ in the last bits. Two runs in one of the fixed
    modes agree bitwise; with "auto" the clock decides.

    Parameters
    ----------
    compile_mode : {"auto", "graph", "fused", "model"}
        "graph" compiles ``train_step`` and its gradient as one graph, and on the CPU steps SGD, Adam and AdamW with
        their fused kernels, unless they were made with ``fused`` or ``foreach``. "fused" is "graph" that refuses an
        optimizer without a fused kernel: clip and step stay seams of the loop, for other add-ons act there, and are
        not in the graph. "model" compiles what the model computes, whatever the loop does around it: it takes several
        ranks and several optimizers, and is seldom faster on a CPU. "auto" times "graph" against the eager step, one
        by one in turn, and keeps the faster.
    compile_backend : str or callable
        A backend of ``torch.compile``; "aot_eager" compiles nothing and is for finding faults.
    fallback_random : bool
        With the backend "inductor", draw dropout's numbers as the eager step does.

    Attributes
    ----------
    compile_report : dict
        "kept" ("compiled" or "eager"), "reason" where the compiler refused, "compile_seconds", "graphs",
        "eager_batches" (of another shape) and, after a trial, the seconds of a "compiled" and an "eager" step and
        "pays_after" so many steps (None: never).

    Raises
    ------
    ConfigError
        The mode or the backend is unknown, torch is too old for a graph, or at ``setup`` the graph cannot hold what
        is asked for: several ranks, several optimizers, a float16 loss scale, hooks of gradients, a ``backward`` of
        your own. With "auto" such a run is eager, and a warning says why.

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
    (3, 'compiled')
    """

    layer = "model"
    slot = "compile"

    def __init__(
        self,
        *args: Any,
        compile_mode: str = "auto",
        compile_backend: str = "inductor",
        fallback_random: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if compile_mode not in _MODES:
            raise ConfigError(f"compile_mode={compile_mode!r}; it must be one of {', '.join(map(repr, _MODES))}"
                              f"{did_you_mean(str(compile_mode), _MODES)}")  # fmt: skip
        backends = torch._dynamo.list_backends(())
        if isinstance(compile_backend, str) and compile_backend not in backends:
            raise ConfigError(
                f"compile_backend={compile_backend!r} is no backend of torch.compile"
                f"{did_you_mean(compile_backend, backends)}; there are {', '.join(backends)}"
            )
        if compile_mode != "model" and not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            raise ConfigError(
                f"compile_mode={compile_mode!r} needs a torch that traces torch.autograd.grad, and torch "
                f"{torch.__version__} does not; update torch, or write compile_mode='model'"
            )
        self.compile_mode, self.compile_backend, self.fallback_random = compile_mode, compile_backend, fallback_random
        self.compile_report: dict[str, Any] = {}
        self._compiled, self._tracing = None, False
        self._full: int | None = None  # Samples of a full batch, where the loader tells.
        self._shapes: Any = None  # Of the batches that are compiled, in this run; and those that the report is of.
        self._reported: Any = None
        self._aliased: set[int] = set()  # Parameters whose gradient comes in memory that is not its own.
        self._trial: dict[str, list[float]] = {}
        self._to_fuse: list[Optimizer] = []
        self._kind, self._began = "", 0.0  # How this window's batches are computed, and since when.

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was compiled: it travels to no other process."""
        state = cast("dict[str, Any]", super().__getstate__())
        return {**state, "_compiled": None, "_aliased": set(), "_tracing": False}

    def setup(self) -> None:
        """Refuse what the graph cannot hold; it is compiled with the first full batch."""
        super().setup()
        self._shapes = None
        if self._reported is None:
            self._begin_report()
        alone = self.compile_mode == "model"
        self._to_fuse = [o for o in self._optimizers.values() if graphs.is_fusible(o) and not alone]
        reason = None if alone else self._not_in_a_graph()
        if reason is not None:
            self._refuse(reason)
        elif not alone:
            self._tracing = True
            graphs.trace_gradients(1)

    def teardown(self) -> None:
        """Leave the compiler's settings as they were."""
        if self._tracing:
            graphs.trace_gradients(-1)
        self._tracing = False
        super().teardown()

    def plan_lines(self, plan: Any) -> list[str]:
        """Suggest no fused kernel where the step takes it as it is."""
        graphed = self.compile_mode != "model" and self.compile_report.get("kept") != "eager"
        if graphed and [each.type for each in self.devices] == ["cpu"] and len(optim.named(self.optimizer)) == 1:
            plan.kernels = {name: text for name, text in plan.kernels.items() if name not in graphs.WITH_KERNEL}
        return super().plan_lines(plan)

    def _not_in_a_graph(self) -> str | None:
        """Name what a graph of the step would leave out, with the remedy."""
        hooked = [name for name, p in self._module.named_parameters() if graphs.has_hooks(p)]
        inside = type(self).__mro__[type(self).__mro__.index(CompileAddon) + 1 :]
        owners = [("backward", owner) for owner in owners_of(type(self), "backward")]
        owners += [("micro_step", owner) for owner in owners_of(type(self), "micro_step") if owner in inside]
        own = [f"{name}() of {each.__name__}" for name, each in owners if not each.__module__.startswith("zae.")]
        parallel = getattr(slots_of(type(self)).get("parallel"), "__name__", None)
        reasons: dict[str, Any] = {
            f"several ranks ({parallel}); {_REMEDY}": self.world_size > 1,
            f"{len(self._optimizers)} optimizers; {_REMEDY}": len(self._optimizers) > 1,
            _SCALED: getattr(self, "precision", None) == "fp16",
            f"hooks of the gradient of {', '.join(hooked)}; {_REMEDY}": hooked,
            f"{' and '.join(own)}; {_REMEDY}": own,
        }
        for name, optimizer in self._optimizers.items() if self.compile_mode == "fused" else ():
            remedy = "write compile_mode='graph', or give torch.optim.AdamW, Adam or SGD"
            remedy += "" if self.device.type == "cpu" else " with fused=True"
            reasons[f"the step of optimizer {name}, a {type(optimizer).__name__} without a fused kernel; {remedy}"] = (
                not all(group.get("fused") for group in optimizer.param_groups) and not graphs.is_fusible(optimizer)
            )
        return next((reason for reason, holds in reasons.items() if holds), None)

    # -------------------------------------------------------------------------------------- gradients, in two ways

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Note how many samples a full batch has."""
        if training:
            sampler = getattr(loader, "batch_sampler", None)
            size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
            self._full = size if isinstance(size, int) else None
        return super().wrap_loader(loader, training)

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Choose how the batches of this window are computed."""
        self._begin_window()
        return super().gradients(batch)

    @replaces
    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Compute loss and gradient in one graph, where a batch is of the shape that was compiled."""
        if self._is_due(batch, count):
            if self.compile_mode == "model":
                with self._model_compiled():
                    return super().micro_step(batch, count)
            out = self._in_graph(batch, count)
            if out is not None:
                return out, self.weight_of(batch, out.get("num_targets"))
        return super().micro_step(batch, count)

    def _is_due(self, batch: Any, count: int) -> bool:
        """Whether a micro-batch is computed by what was compiled."""
        if self.compile_report["kept"] == "eager":
            return False
        shapes = (graphs.shapes_of(batch), count)
        if self._shapes is None:
            # The same on any way to this step: a resumed run may begin with the short batch.
            full = self._full in (None, leading_dimension(batch))
            if full and count == getattr(self, "gradient_accumulation_steps", count):
                self._settle_on(shapes)
        if shapes != self._shapes:
            self._pass_over()
        return self._kind == "compiled" and self.compile_report["kept"] == "compiled"

    def _pass_over(self) -> None:
        """Count a batch that has to be eager; a window with one is not timed."""
        self._kind = ""
        self.compile_report["eager_batches"] += 1

    def _settle_on(self, shapes: Any) -> None:
        """Compile batches of these shapes; what was found for them in an earlier run is still so."""
        self._shapes = shapes
        if self._reported not in (None, shapes):
            self._begin_report()
        self._reported = shapes
        if self.compile_mode != "model" and getattr(self, "scaler", None) is not None:
            self._refuse(_SCALED)  # Which precision a device computes in is settled after our setup.

    def _begin_report(self) -> None:
        self._trial = {"compiled": [], "eager": []}
        self.compile_report = {"kept": "compiled", "compile_seconds": 0.0, "graphs": 0, "eager_batches": 0}

    @contextmanager
    def _model_compiled(self) -> Iterator[None]:
        """Have the module's call compiled, so that wrappers around it and its type stay what they are."""
        state = self._module.__dict__
        before = state.get("_compiled_call_impl")
        state["_compiled_call_impl"] = self._timed
        try:
            yield
        finally:
            state["_compiled_call_impl"] = before

    def _in_graph(self, batch: Any, count: int) -> dict[str, Any] | None:
        """Compute a micro-batch by the compiled graph; None where it has to be eager."""
        parameters = [p for p in self.parameters if p.requires_grad]
        if any(map(graphs.has_hooks, parameters)):
            self._pass_over()
            return None
        before = self.compile_report["graphs"]
        try:
            with self.forward_context():
                out, gradients = self._timed(batch, count, parameters)
        except graphs.refusals() as error:  # It is refused as a whole, before anything is computed.
            self._give_up(f"torch.compile refuses it: {str(error).strip()[:500]}")
            return None
        if self.compile_report["graphs"] != before:
            self._aliased |= graphs.sharing(parameters, gradients, tree_leaves((batch, out)))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if id(parameter) in self._aliased and gradient is not None:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient
        return cast("dict[str, Any]", out)

    def _with_gradients(self, batch: Any, count: int, parameters: list[Tensor]) -> tuple[dict[str, Any], Any]:
        """What is compiled: the step, and the gradient of its share of the window."""
        out = self.train_step(batch)
        if not isinstance(out, Mapping):
            raise TypeError  # Refused by the compiler; the eager step then says what it should be.
        with torch.autocast(self.device.type, enabled=False):  # As the backward is by hand: outside of autocast.
            loss = self.weigh(out["loss"], out.get("num_targets"), count)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {key: graphs.detached(value) for key, value in out.items()}, gradients

    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        """What is compiled of a model alone; its own call would only lead back to here."""
        return self._module._call_impl(*args, **kwargs)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is compiled, and note the graphs that were made for it."""
        compiled = self._compiled = self._compiled or self._compile()
        before, start = graphs.graphs_made(), time.perf_counter()
        result = compiled(*args, **kwargs)
        made = graphs.graphs_made() - before
        if made > 0:
            self.compile_report["graphs"] += made
            self.compile_report["compile_seconds"] += time.perf_counter() - start
        return result

    def _compile(self) -> Any:
        options = graphs.options_of(self.compile_backend, self.fallback_random)
        if self.compile_mode == "model":
            return torch.compile(self._call_module, **options)
        return torch.compile(self._with_gradients, fullgraph=True, **options)

    # ------------------------------------------------------------------------------------ the optimizer, and a trial

    def optimizer_step(self) -> bool:
        """Step with the fused kernel, where there is one; it is no lasting setting of the optimizer."""
        fused = self._kind != "eager" and self.compile_report["kept"] == "compiled"
        groups = [g for o in self._to_fuse if fused and graphs.fits_kernel(o) for g in o.param_groups]
        before = [(group["fused"], group["foreach"]) for group in groups]
        for group in groups:
            group["fused"], group["foreach"] = True, False
        try:
            stepped = super().optimizer_step()
        finally:
            for group, kept in zip(groups, before):
                group["fused"], group["foreach"] = kept
        if self._began and self._kind:
            graphs.wait_for(self.device)
            self._trial[self._kind].append(time.perf_counter() - self._began)
            graphs.judge(self._trial, self.compile_report)
        return stepped

    def _begin_window(self) -> None:
        """Choose how a window is computed: in a trial, one way and the other in turn."""
        self._kind, self._began = "compiled", 0.0
        report = self.compile_report
        if self.compile_mode != "auto" or report["kept"] == "eager" or "pays_after" in report or self._shapes is None:
            return
        compiled, eager = map(len, self._trial.values())
        self._kind = "eager" if eager < compiled else "compiled"
        graphs.wait_for(self.device)
        self._began = time.perf_counter()

    def _refuse(self, reason: str) -> None:
        """Say what a graph cannot hold; where nobody asked for a graph, run eagerly."""
        if self.compile_mode != "auto":
            raise ConfigError(f"compile_mode={self.compile_mode!r} cannot hold {reason}")
        self._give_up(f"a graph cannot hold {reason}")

    def _give_up(self, reason: str) -> None:
        """Run eagerly from now on."""
        self.compile_report |= {"kept": "eager", "reason": reason}
        if self.is_main:
            _log.warning("the step runs eagerly, for %s", reason)
