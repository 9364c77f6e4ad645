"""Compile the model or the training step with torch.compile."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn

from zae import torch_private
from zae.addon import AddOnBase
from zae.errors import ConfigError, did_you_mean
from zae.model.weights import has_lazy
from zae.torch_private import compiler, inductor_modes

__all__ = ["CompileAddon"]

_SETTINGS: dict[str, Any] = {
    "config.skip_nnmodule_hook_guards": False,
    "config.use_numpy_random_stream": True,
    "variables.RandomVariable._supported_fn_names": frozenset(),
}
"""Make a graph check for module hooks that were added later, and draw the random numbers of NumPy and ``random.Random``
outside of it: torch 2.13 would draw the former from its own stream, and treat the latter as constants."""
_in_use: dict[str, tuple[int, Any]] = {}  # How many trainers use a setting, and its value before.


class CompileAddon(AddOnBase):
    """Compile the model, or the training step, with ``torch.compile``.

    Training alone is compiled. The module itself is not changed, and a checkpoint has its keys: a run can resume from
    it with or without this add-on.

    Parameters
    ----------
    compile_target : {"model", "step"}
        "model" compiles the calls of ``self.model``, inside of its wrappers; "step" compiles ``train_step``, the loss
        with it, on one rank.
    compile_mode : str, optional
        A mode of ``torch.compile``: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
    compile_backend : str or callable
        A backend of ``torch.compile``; "aot_eager" only traces, for debugging.
    compile_options : mapping of str, optional
        Options of the backend, instead of a mode, as ``torch.compile(options=...)`` takes them.
        ``{"fallback_random": True}`` lets "inductor" draw the random numbers of the eager step.
    compile_dynamic : bool, optional
        False compiles each shape for itself, up to torch's limit of 8; True makes one graph for all shapes; with None,
        torch decides by the order in which shapes come, which a resumed run may change.

    Attributes
    ----------
    compile_report : dict
        How many "graphs" were made, and the "compile_seconds" of the calls that made them.

    Raises
    ------
    ConfigError
        A target, mode, backend or option is unknown; "step" has several ranks; or a step has several batches, and the
        mode replays CUDA graphs.

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
    >>> trainer = Task.add_on(CompileAddon)(model, "cpu", optimizer=optimizer, compile_backend="aot_eager")
    >>> trainer.run(1, [torch.ones(4, 2)] * 3)["step"], trainer.compile_report["graphs"]
    (3, 1)
    """

    layer = "model"
    compile_report: dict[str, Any]
    slot = "compile"
    traits = ("compiles_model",)
    process_attributes = {"_compiled": None, "_eager": None, "_has_settings": False}

    def __init__(
        self,
        *args: Any,
        compile_target: Literal["model", "step"] = "model",
        compile_mode: str | None = None,
        compile_backend: Annotated[str, "the name of a backend of torch.compile"] | Callable[..., Any] = "inductor",
        compile_options: Annotated[Mapping[str, Any], "a dict, for instance {'max_autotune': True}"] | None = None,
        compile_dynamic: bool | None = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.compile_target = compile_target
        self.compile_mode = compile_mode
        self.compile_backend = compile_backend
        self.compile_options = compile_options
        self.compile_dynamic = compile_dynamic
        self.compile_report = {"graphs": 0, "compile_seconds": 0.0}
        self._check_options()
        self._compiled: Any = None
        self._eager: Any = None
        self._has_settings = False

    def _check_options(self) -> None:
        """Refuse what ``torch.compile`` would refuse with the first batch, and an unknown target."""
        mode = self.compile_mode
        backend = self.compile_backend
        options = self.compile_options
        backends = torch.compiler.list_backends(())
        if isinstance(backend, str) and backend not in backends:
            raise ConfigError(
                f"compile_backend={backend!r} is not a backend of torch.compile{did_you_mean(backend, backends)}; "
                f"available: {', '.join(backends)}"
            )
        is_of_inductor = mode not in (None, "default")
        if (mode is not None and options is not None) or (is_of_inductor and backend != "inductor"):
            second = "compile_options" if options is not None else f"compile_backend={backend!r}"
            raise ConfigError(
                f"compile_mode={mode!r} chooses options of the backend 'inductor', and {second} is given too; leave "
                "one of them out"
            )
        try:
            torch.compile(lambda: None, **self._arguments())
        except RuntimeError as error:
            name = "compile_mode" if mode is not None else "compile_options"
            raise ConfigError(f"{name}: {str(error).partition(', known')[0]}") from None

    def _arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for ``torch.compile``."""
        arguments: dict[str, Any] = {"backend": self.compile_backend, "dynamic": self.compile_dynamic}
        if self.compile_mode is not None:
            arguments["mode"] = self.compile_mode
        if self.compile_options is not None:
            arguments["options"] = dict(self.compile_options)
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            # Otherwise all trainers of a process share the limit on the graphs of one function.
            arguments["isolate_recompiles"] = True
        return arguments

    def changed_modules(self, how: str) -> Mapping[str, Any]:
        """Add the model, which is compiled."""
        changed = super().changed_modules(how)
        return {**changed, "": self.unwrap()} if how == "compiled" else changed

    def setup(self) -> None:
        """Refuse several ranks for the step, and set what the compiler must guard."""
        super().setup()
        if self.compile_target == "step" and self.world_size > 1:
            raise ConfigError(
                f"compile_target='step' with {self.world_size} ranks: the wrapper of the model, which exchanges "
                "gradients, would be part of the graph; write compile_target='model'"
            )
        if not self._has_settings:  # A setup may follow another without a teardown.
            self._has_settings = True
            _use_settings(1)

    def wrap_model(self, model: nn.Module) -> Any:
        """Note the module whose calls are compiled."""
        self._eager = super().wrap_model(model)
        return self._eager

    def teardown(self) -> None:
        """Restore the compiler's settings."""
        if self._has_settings:
            self._has_settings = False
            _use_settings(-1)
        self._eager = None
        super().teardown()

    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Compute a micro-batch with the compiled model or step."""
        if count > 1 and self._replays_graphs():
            option = f"compile_mode={self.compile_mode!r}" if self.compile_options is None else "compile_options"
            raise ConfigError(
                f"{option} replays graphs of the device, whose gradients lie in the same memory each time, and torch "
                f"would add up those of a step of {count} batches wrongly; write "
                "compile_mode='max-autotune-no-cudagraphs' or 'default', or make a step of one batch"
            )
        if has_lazy(self.parameters):  # A lazy layer draws its weights; the compiler would restore the stream.
            return super().micro_step(batch, count)
        with self._compiled_model() if self.compile_target == "model" else self._compiled_step():
            return super().micro_step(batch, count)

    def _replays_graphs(self) -> bool:
        """Return whether the backend captures what it compiles as graphs of the device."""
        options = self.compile_options or inductor_modes().get(self.compile_mode, {})
        return self.device.type != "cpu" and bool(options.get("triton.cudagraphs"))

    def _compiled_model(self) -> AbstractContextManager[None]:
        """Let calls of the model, inside of its wrappers, be compiled within the context."""
        return torch_private.call_instead(self._eager, partial(self._call_compiled, self._call_module))

    @contextmanager
    def _compiled_step(self) -> Iterator[None]:
        """Let calls of ``train_step`` be compiled within the context."""
        attributes = vars(self)
        step = self.train_step
        had_own = "train_step" in attributes
        attributes["train_step"] = partial(self._call_compiled, step)
        try:
            yield
        finally:
            if had_own:
                attributes["train_step"] = step
            else:
                del attributes["train_step"]

    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, past the function that the compiled call replaces."""
        return torch_private.call_of(self._eager)(*args, **kwargs)

    def _call_compiled(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function compiled, and count the graphs that are made for it."""
        if self._compiled is None:
            self._compiled = torch.compile(function, **self._arguments())
        before = torch_private.compiled_graphs()
        start = time.perf_counter()
        result = self._compiled(*args, **kwargs)
        new_graphs = torch_private.compiled_graphs() - before
        if new_graphs > 0:
            self.compile_report["graphs"] += new_graphs
            self.compile_report["compile_seconds"] += time.perf_counter() - start
        return result


def _use_settings(change: int) -> None:
    """Set values in ``torch._dynamo`` while any trainer of the process uses them, and restore those from before."""
    for place, value in _SETTINGS.items():
        path, _, name = place.rpartition(".")
        owner = compiler(path)
        if not hasattr(owner, name):  # Another version of torch.
            continue
        count, before = _in_use.get(place, (0, None))
        before = before if count else getattr(owner, name)
        _in_use[place] = (count + change, before)
        setattr(owner, name, value if count + change else before)
