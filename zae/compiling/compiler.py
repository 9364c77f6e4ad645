"""Settings, options and refusals of torch.compile for `CompileAddon`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from zae.common.torch_private import compiler
from zae.errors import ConfigError, did_you_mean

__all__ = [
    "GUARDS",
    "TRACES",
    "acquire_settings",
    "check_compiler",
    "check_options",
    "is_off",
    "options_of",
    "reason_of",
    "refusals",
    "release_settings",
    "synchronize",
]

GUARDS: dict[str, Any] = {
    "config.skip_nnmodule_hook_guards": False,
    "config.use_numpy_random_stream": True,
    "variables.RandomVariable._supported_fn_names": frozenset(),
}
"""Make a graph check for module hooks that were added later, and refuse random numbers of NumPy and ``random.Random``:
torch 2.13 would draw the former from its own stream, and treat the latter as constants."""
TRACES = {"config.trace_autograd_ops": True, **GUARDS}
"""Trace ``torch.autograd.grad`` as well."""
_MODES = ("auto", "graph", "fused", "model")
_OF_TORCH = (
    ", which say what is compiled. That is a mode of torch.compile, which says how: for 'max-autotune' write "
    "compile_options={'max_autotune': True}"
)
_in_use: dict[str, tuple[int, Any]] = {}  # How many trainers use a setting, and its value before.


def check_compiler(mode: Any, backend: Any) -> None:
    """Refuse an unknown mode or backend, and a torch that cannot trace ``torch.autograd.grad`` where it is needed."""
    if mode not in _MODES:
        is_of_torch = str(mode).startswith(("max-autotune", "reduce-overhead", "default"))
        hint = _OF_TORCH if is_of_torch else did_you_mean(str(mode), _MODES)
        raise ConfigError(f"compile_mode={mode!r}; it must be one of {', '.join(map(repr, _MODES))}{hint}")
    backends = torch.compiler.list_backends(())
    if not isinstance(backend, str) and not callable(backend):
        raise ConfigError(
            f"compile_backend={backend!r}; it must be the name of a backend of torch.compile, or a function"
        )
    if isinstance(backend, str) and backend not in backends:
        raise ConfigError(
            f"compile_backend={backend!r} is not a backend of torch.compile{did_you_mean(backend, backends)}; "
            f"available: {', '.join(backends)}"
        )
    if mode != "model" and not hasattr(compiler("config"), "trace_autograd_ops"):
        raise ConfigError(
            f"compile_mode={mode!r} needs a torch that traces torch.autograd.grad, and torch {torch.__version__} does "
            "not; update torch, or write compile_mode='model'"
        )


def check_options(options: Any, mode: str, backend: Any) -> dict[str, Any]:
    """Return the options of inductor as a dict; refuse those that it does not have, or that a graph cannot take."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"compile_options={options!r:.80}; write a dict of options of inductor, for instance "
            "{'max_autotune': True}"
        )
    if backend != "inductor":
        raise ConfigError(f"compile_options are those of the backend 'inductor', and compile_backend={backend!r}")
    if options.get("triton.cudagraphs") and mode != "model":
        raise ConfigError(
            "compile_options has 'triton.cudagraphs', which writes the gradients of each batch over those of the last "
            "one; leave it out, or write compile_mode='model'"
        )
    try:
        torch.compile(lambda: None, options=dict(options))
    except RuntimeError as error:
        known = str(error).partition(", known")[0]
        raise ConfigError(f"compile_options: {known}; torch._inductor.list_options() returns the known ones") from None
    return dict(options)


def options_of(backend: Any, fallback_random: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for ``torch.compile``; with ``fallback_random`` inductor draws as the eager step."""
    options: dict[str, Any] = {"backend": backend, "dynamic": False}
    if backend == "inductor" and (fallback_random or more):
        options["options"] = {**({"fallback_random": True} if fallback_random else {}), **more}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # Else all trainers of a process share the limit on the graphs of one function.
        options["isolate_recompiles"] = True
    return options


def is_off() -> bool:
    """Return whether torch.compile is switched off, so that it would run a function eagerly."""
    by_name = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    return by_name or bool(compiler("config.disable")) or compiler("eval_frame._stance.stance") == "force_eager"


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors that the compiler raises before it computes anything."""
    # The second is not derived from the first.
    kinds = (compiler("exc.TorchDynamoException"), compiler("exc.FailOnRecompileLimitHit"))
    return tuple(kind for kind in kinds if kind is not None)


def reason_of(refusal: Exception) -> str:
    """Return why the compiler refuses a step."""
    if type(refusal).__name__ == "FailOnRecompileLimitHit":
        return (
            "torch.compile recompiled it too often: it reads a Python value that changes with each step, a counter "
            "for instance (TORCH_LOGS=recompiles names it)"
        )
    return f"torch.compile refuses it: {str(refusal).strip()[:500]}"


def acquire_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set values in ``torch._dynamo``, by path, for as long as any trainer of the process uses them."""
    _count_users(settings, 1)
    return settings


def release_settings(settings: Mapping[str, Any]) -> None:
    """Restore the values that the settings had before, when no other trainer uses them."""
    _count_users(settings, -1)


def _count_users(settings: Mapping[str, Any], change: int) -> None:
    for place, value in settings.items():
        path, _, name = place.rpartition(".")
        owner = compiler(path)
        if not hasattr(owner, name):  # Another version of torch.
            continue
        count, before = _in_use.get(place, (0, None))
        before = before if count else getattr(owner, name)
        _in_use[place] = (count + change, before)
        setattr(owner, name, value if count + change else before)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished, before the clock is read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
