"""Trace the forward of a model with ``torch.fx``: the modules of a stage are single calls."""

from __future__ import annotations

import inspect
import numbers
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from zae.common.torch_private import call_hooks, version_of
from zae.errors import ConfigError

__all__ = ["REMEDY", "bind", "constants_in", "defaults_of", "trace"]

REMEDY = (
    "Put the computation into a separate module, which is not traced, or give split=a function of the model and of the "
    "number of stages that returns the modules of the stages in their order; each is called with what the one before "
    "returns"
)
_DECIDING = (bool, int, float, str, type(None))
_CALLS = ("call_function", "call_method", "call_module", "get_attr")
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class _Tracer(fx.Tracer):
    """Trace the forward of the opened modules; all other modules are single calls."""

    def __init__(self, opened: Collection[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self._opened = opened
        self._constants = constants
        self._modes = _modes()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Give the forward its constants as they are, and a placeholder for each other argument."""
        forward = self.root.forward
        positional = list[Any]()
        named = dict[str, Any]()
        for name, each in inspect.signature(forward).parameters.items():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                continue
            is_constant = name in self._constants
            value = self._constants[name] if is_constant else self.create_proxy("placeholder", name, (), {})
            if each.kind is each.KEYWORD_ONLY:
                named[name] = value
            else:
                positional.append(value)
        return lambda: forward(*positional, **named), []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a single call."""
        return module_qualified_name not in self._opened

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse a computation in a mode that the graph does not record."""
        node = super().create_node(kind, *args, **kwargs)
        if kind in _CALLS and _modes() != self._modes:
            raise ConfigError(
                f"the forward of {type(self.root).__name__} computes {node.name} under no_grad or autocast, which a "
                f"stage would leave out. {REMEDY}"
            )
        return node


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


@contextmanager
def _unchanged(model: nn.Module, opened: Collection[str]) -> Iterator[None]:
    """Refuse a forward that changes buffers or attributes of the model: it is called here once, and by no stage."""
    buffers = {name: (each, version_of(each), each.detach().clone()) for name, each in model.named_buffers()}
    modules = {name: each for name, each in model.named_modules() if name in opened}
    before = {name: dict(vars(each)) for name, each in modules.items()}
    yield
    changed = []
    for name, (each, version, value) in buffers.items():
        if version_of(each) != version:
            each.detach().copy_(value)
            changed.append(name)
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            held = before[name].get(key)
            is_counted = isinstance(held, numbers.Number) and value != held
            if isinstance(value, fx.Proxy) or is_counted:
                vars(module)[key] = held
                changed.append(f"{name}.{key}" if name else key)
    if changed:
        raise ConfigError(
            f"the forward of {type(model).__name__} sets {changed[0]}, which no stage would do, because this forward "
            "is divided: return it, or let a module of its own, within a stage, set it"
        )


def _check_forward(model: nn.Module, opened: Collection[str]) -> None:
    """Refuse inputs without a name, and hooks of modules whose forward is divided: no stage would call them."""
    for each in inspect.signature(model.forward).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes *{each.name}: name each input of the model there"
            )
    for name, module in model.named_modules():
        if name in opened and (kind := call_hooks(module)):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has a {kind}, which no stage would call, because its "
                "forward is divided; remove it, or register it on a module within a stage"
            )


def trace(model: nn.Module, opened: Collection[str], constants: Mapping[str, Any]) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph of a forward, and the tensors that the forward makes itself.

    Parameters
    ----------
    model : Module
        Its parameters may be on the meta device: nothing is computed.
    opened : collection of str
        The paths of the modules whose forward is traced.
    constants : mapping
        Arguments that are no placeholders.

    Raises
    ------
    ConfigError
        The forward decides by values of tensors, or draws random numbers.
    """
    _check_forward(model, opened)
    before = set(vars(model))
    streams = torch.get_rng_state()
    made: dict[str, Any] = {}
    try:
        with _unchanged(model, opened):
            graph = _Tracer(opened, constants).trace(model)
    except ConfigError:
        raise
    except Exception as error:
        text = f"{_line_of(error)}{type(error).__name__}: {error}"
        raise ConfigError(
            f"split: the forward of {type(model).__name__} cannot be traced ({text:.300}). {REMEDY}"
        ) from error
    finally:
        for name in set(vars(model)) - before:
            made[name] = vars(model).pop(name)
    if not torch.equal(streams, torch.get_rng_state()):
        torch.set_rng_state(streams)
        raise ConfigError(
            f"the forward of {type(model).__name__} draws random numbers that do not depend on its inputs, and would "
            f"be the same in each step. {REMEDY}"
        )
    return graph, made


def _line_of(error: Exception) -> str:
    """Return the line of the model that failed."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OWN)]
    last = frames[-1] if frames else None
    return f"{Path(last.filename).name}, line {last.lineno}, `{last.line}`: " if last and last.line else ""


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, each in bound.signature.parameters.items():
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            found[name] = bound.arguments[name]
        elif bound.arguments[name]:
            raise ConfigError(
                f"self.model was called with {bound.arguments[name]!r:.80} for {name}, where the forward of "
                f"{type(model).__name__} names no parameter. {REMEDY}"
            )
    return found


def constants_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which a forward may decide: numbers, text and None."""
    return {name: each for name, each in values.items() if isinstance(each, _DECIDING)}


def defaults_of(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that a call may leave out, by which the forward may decide; it is called with the first."""
    _, *others = inspect.signature(model.forward).parameters.items()
    return constants_in({name: each.default for name, each in others})
