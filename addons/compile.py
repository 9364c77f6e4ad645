"""Compiled training steps: the model, or forward, loss and backward as one graph, where that is faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zae.addon import AddOnBase, replaces
from zae.errors import ConfigError, did_you_mean
from zae.seams import slots_of

__all__ = ["CompileAddon"]

_log = logging.getLogger("zae")
_MODES = ("auto", "graph", "fused", "model")
_TRIAL = 20  # Steps of each kind that "auto" times; the first few of a kind are slower.


class CompileAddon(AddOnBase):
    """Compile the training step, and run eagerly whatever the compiled one was not made for.

    The module that was given stays as it is: evaluation runs it eagerly, and a checkpoint has its keys. A batch of
    another shape than the first (the short one at an epoch's end) runs eagerly as well, instead of compiling again,
    and so does everything when the compiler refuses the step; a warning says why. Compiled and eager arithmetic
    differ in rounding.

    Parameters
    ----------
    compile_mode : {"auto", "graph", "fused", "model"}
        "model" compiles what ``self.model`` computes. "graph" compiles ``train_step`` and its gradient as one graph;
        "fused" steps the optimizer with its fused kernel as well. "auto" times "graph" against the eager step and
        keeps the faster one: which that is, and so the last bits of the weights, depends on the machine.
    compile_backend : str
        A backend of ``torch.compile``.
    fallback_random : bool
        With the backend "inductor", draw dropout's numbers as the eager step does.

    Attributes
    ----------
    compile_report : dict
        "kept" ("compiled" or "eager"), "compile_seconds", "graphs" and, after a trial, the seconds of a "compiled" and
        an "eager" step and "pays_after" so many steps.

    Raises
    ------
    ConfigError
        The mode is unknown, torch is too old for a graph, or at ``setup`` the graph cannot hold what is asked for:
        several ranks, several optimizers, a float16 loss scale, gradient hooks.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons.compile import CompileAddon
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
        if compile_mode != "model" and not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            raise ConfigError(
                f"compile_mode={compile_mode!r} needs a torch that traces torch.autograd.grad, and torch "
                f"{torch.__version__} does not; update torch, or write compile_mode='model'"
            )
        self.compile_mode, self.compile_backend, self.fallback_random = compile_mode, compile_backend, fallback_random
        self.compile_report: dict[str, Any] = {}
        self._compiled: Any = None
        self._unfused: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._traced_before: Any = None
        self._shapes: Any = None
        self._times: dict[str, list[float]] = {}

    def setup(self) -> None:
        """Refuse what the graph cannot hold; it is compiled with the first batch."""
        super().setup()
        self._shapes, self._times = None, {"compiled": [], "eager": []}
        self.compile_report = {"kept": "compiled", "compile_seconds": 0.0, "graphs": 0}
        if self.compile_mode == "model":
            self._compiled = torch.compile(self._module, dynamic=False, **self._options())
            return
        self._refuse()
        self._traced_before = torch._dynamo.config.trace_autograd_ops
        torch._dynamo.config.trace_autograd_ops = True
        self._compiled = torch.compile(self._with_gradients, fullgraph=True, dynamic=False, **self._options())
        if self.compile_mode == "fused":
            self._fuse()

    def teardown(self) -> None:
        """Drop the compiled functions: they travel to no other process."""
        self._compiled = None
        for group, before in self._unfused:
            group.update(before)
        self._unfused = []
        if self._traced_before is not None:
            torch._dynamo.config.trace_autograd_ops, self._traced_before = self._traced_before, None
        super().teardown()

    def _fuse(self) -> None:
        """Let the optimizer step with its fused kernel, for the time of the run."""
        for name, optimizer in self._optimizers.items():
            if "fused" not in optimizer.defaults:
                raise ConfigError(
                    f"compile_mode='fused' needs an optimizer that has a fused kernel, and optimizer {name} is a "
                    f"{type(optimizer).__name__}; write compile_mode='graph', or give torch.optim.AdamW or SGD"
                )
            for group in optimizer.param_groups:
                self._unfused.append((group, {key: group[key] for key in ("fused", "foreach")}))
                group.update(fused=True, foreach=False)

    def _options(self) -> dict[str, Any]:
        """What ``torch.compile`` is told."""
        options: dict[str, Any] = {"backend": self.compile_backend}
        if self.fallback_random and self.compile_backend == "inductor":
            options["options"] = {"fallback_random": True}
        return options

    def _refuse(self) -> None:
        """Name what a graph of the whole step would leave out: it calls no hook, and no ``backward``."""
        hooked = [n for n, p in self._module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
        own = type(self).backward
        reasons = {
            f"several ranks ({slots_of(type(self)).get('parallel')})": self.world_size > 1,
            f"{len(self._optimizers)} optimizers": len(self._optimizers) > 1,
            "a float16 loss scale": getattr(self, "precision", None) == "fp16" or getattr(self, "scaler", None),
            f"hooks of the gradient of {', '.join(hooked)}": hooked,
            "a backward() of your own": not own.__module__.startswith("zae."),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(
                    f"compile_mode={self.compile_mode!r} cannot hold {reason}; write compile_mode='model', which can"
                )

    def _with_gradients(self, batch: Any, count: int, parameters: list[Tensor]) -> tuple[dict[str, Any], Any]:
        """What is compiled: the step, and the gradient of its share of the window."""
        out = self.train_step(batch)
        loss = self.weigh(out["loss"], out.get("num_targets"), count)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {k: v.detach() if isinstance(v, Tensor) else v for k, v in out.items()}, gradients

    @replaces
    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Leave the gradients behind, compiled where the batch is of the shape that was compiled."""
        if self._compiled is None:
            return super().gradients(batch)
        micro_batches = self.micro_batches(batch)
        count = len(micro_batches)
        outputs, targets = [], []
        for index, micro_batch in enumerate(micro_batches, start=1):
            with self.sync_context(index == count):
                micro_batch = self.to_device(micro_batch)
                out = self._one(micro_batch, count)
            targets.append(out.get("num_targets"))
            outputs.append((out, self.weight_of(micro_batch, targets[-1])))
        self.normalize(targets)
        return outputs

    def _one(self, batch: Any, count: int) -> Mapping[str, Any]:
        """Forward and backward of one micro-batch, in the way that is due."""
        shapes = (_shapes_of(batch), count)
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes or self._compiled is None:
            return self._eagerly(batch, count)
        trial = self.compile_mode == "auto" and "eager" not in self.compile_report
        if not trial:
            return self._compiled_step(batch, count)
        kind = "eager" if len(self._times["compiled"]) > _TRIAL else "compiled"
        start = time.perf_counter()
        out = self._eagerly(batch, count) if kind == "eager" else self._compiled_step(batch, count)
        self._times[kind].append(time.perf_counter() - start)
        if len(self._times["eager"]) > _TRIAL:
            self._decide()
        return out

    def _eagerly(self, batch: Any, count: int) -> Mapping[str, Any]:
        """The step as `Trainer.gradients` makes it, whose own loop has a window of one batch here."""
        with self.forward_context():
            out = self.train_step(batch)
        self.backward(self.weigh(out["loss"], out.get("num_targets"), count))
        return out

    def _compiled_step(self, batch: Any, count: int) -> Mapping[str, Any]:
        """The compiled step; the first call compiles, and where that fails, every step is eager from now on."""
        if self.compile_report["compile_seconds"]:
            return self._call(batch, count)
        start, before = time.perf_counter(), _graphs()
        out = self._call(batch, count)
        self.compile_report["compile_seconds"] = time.perf_counter() - start
        self.compile_report["graphs"] = _graphs() - before
        return out

    def _call(self, batch: Any, count: int) -> Mapping[str, Any]:
        """Call what was compiled, and leave the gradients behind."""
        if self.compile_mode == "model":
            self.model = self._compiled
            try:
                return self._eagerly(batch, count)
            finally:
                self.model = self._module
        parameters = [p for p in self.parameters if p.requires_grad]
        try:
            with self.forward_context():
                out, gradients = self._compiled(batch, count, parameters)
        except torch._dynamo.exc.TorchDynamoException as error:  # Nothing has been computed then.
            _log.warning("the step runs eagerly, for torch.compile refuses it: %s", str(error).strip()[:500])
            self._compiled, self.compile_report["kept"] = None, "eager"
            return self._eagerly(batch, count)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient
        return dict(out)

    def _decide(self) -> None:
        """Keep the faster step, and say what was found."""
        report = self.compile_report
        for kind, times in self._times.items():
            report[kind] = median(times[len(times) // 2 :])
        gain = report["eager"] - report["compiled"]
        report["pays_after"] = int(report["compile_seconds"] / gain) + 1 if gain > 0 else None
        if gain <= 0:
            self._compiled, report["kept"] = None, "eager"
        _log.info("compile_mode='auto' keeps the %(kept)s step: %(compiled).3g s compiled, %(eager).3g s eager; "
                  "compiled in %(compile_seconds).1f s, %(graphs)d graphs, pays after %(pays_after)s steps",
                  report)  # fmt: skip


def _shapes_of(batch: Any) -> Any:
    """The shapes and types in a batch: what a graph is compiled for."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _shapes_of(value)) for key, value in batch.items())
    return tuple(map(_shapes_of, batch)) if isinstance(batch, (tuple, list)) else type(batch)


def _graphs() -> int:
    """How many graphs this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
