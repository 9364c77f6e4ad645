"""Which modules the forward of a model calls, one after another, and what it gives to each of them.

The forward is called once with placeholders, and with placeholders for its modules: what it does beside calling one
module after another with what the one before returned is an error, and is answered with what to write.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zae import random_state
from zae.distributed.blocks import class_name
from zae.errors import ConfigError
from zae.torch_private import call_hooks

__all__ = [
    "REMEDY",
    "Call",
    "Value",
    "bind",
    "calls_in_forward",
    "constants_in",
    "leaves_in",
    "map_leaves",
    "tensors_of",
]

_DECIDING = (bool, int, float, str, type(None))
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
REMEDY = (
    "A divided forward calls modules one after another, each with what the one before returned, inputs of the model "
    "and numbers. Put other computation into a module, or give split=a function of the model and of the number of "
    "stages that returns the modules of the stages in their order; each is called with what the one before returns"
)
"""What to write where a forward cannot be divided."""


class Value(Tensor):
    """Stands for an input of the model, or for what a module returned; nothing can be computed with it, or read of it.

    Attributes
    ----------
    argument : str
        The name of the input; empty for what a module returned.
    """

    argument: str

    @staticmethod
    def __new__(cls, argument: str = "") -> Value:
        value = torch.empty(0).as_subclass(cls)
        value.argument = argument
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(func, '__name__', func)} of what passes from one module to the next")


class Call(NamedTuple):
    """A call of a module; its arguments have placeholders."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Placeholder(nn.Module):
    """Stands for a module: a call of it is recorded."""

    def __init__(self, path: str, record: Callable[[Call], Value]) -> None:
        super().__init__()
        vars(self).update(path=path, record=record)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["record"](Call(vars(self)["path"], args, kwargs))


def calls_in_forward(model: nn.Module, opened: Collection[str], constants: Mapping[str, Any]) -> tuple[list[Call], Any]:
    """Call the forward of the opened modules; return in order which others it calls, and what it returns."""
    ids_of_model = set(map(id, tensors_of(model).values()))
    calls: list[Call] = []
    outputs: list[Value] = []
    modes = _modes()
    refuse = functools.partial(_refusal, model)

    def check(values: Any, receiver: str) -> None:
        """Refuse what a stage would not have, and all but the last output."""
        leaves = leaves_in(values)
        for leaf in leaves:
            if not isinstance(leaf, (*_DECIDING, Value)) and id(leaf) not in ids_of_model:
                raise refuse(f"gives {receiver} a {type(leaf).__name__} that it has made")
        received = {id(leaf) for leaf in leaves if isinstance(leaf, Value) and not leaf.argument}
        if received != set(map(id, outputs[-1:])):
            raise refuse(f"gives {receiver} something else than what {calls[-1].path}, before it, has returned")

    def record(call: Call) -> Value:
        if _modes() != modes:
            raise refuse(f"calls {call.path} under no_grad or autocast, which a stage would leave out")
        check((call.args, call.kwargs), call.path)
        calls.append(call)
        outputs.append(Value())
        return outputs[-1]

    arguments = {**{name: Value(name) for name in _inputs_of(model)}, **constants}
    try:
        with random_state.isolated(), _with_placeholders(model, opened, record):
            streams = random_state.comparable()
            returned = model.forward(**arguments)
            if random_state.comparable() != streams:
                raise refuse("draws random numbers, which each rank would do for itself")
    except ConfigError:
        raise
    except Exception as error:
        text = f"{_line_of(error)}{type(error).__name__}: {error}"
        raise ConfigError(
            f"split: the forward of {class_name(model)} cannot be divided ({text:.300}). {REMEDY}"
        ) from error
    check(returned, "its caller")
    return calls, returned


def _refusal(model: nn.Module, text: str) -> ConfigError:
    return ConfigError(f"the forward of {class_name(model)} {text}. {REMEDY}")


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _inputs_of(model: nn.Module) -> list[str]:
    """Return the arguments of the forward that have no default."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"the forward of {class_name(model)} takes *{parameter.name}: name each input of the model there"
            )
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names


@contextmanager
def _with_placeholders(model: nn.Module, opened: Collection[str], record: Callable[[Call], Value]) -> Iterator[None]:
    """Put placeholders in the place of the modules that a stage calls; refuse what no stage would do beside it."""
    owners = {path: model.get_submodule(path) for path in opened}
    for path, owner in owners.items():
        if kind := call_hooks(owner):
            raise ConfigError(
                f"{path or 'the model'} ({type(owner).__name__}) has a {kind}, which no stage would call, because its "
                "forward is divided; remove it, or register it on a module within a stage"
            )
    attributes = {path: dict(vars(owner)) for path, owner in owners.items()}
    modules = {path: _children_of(owner) for path, owner in owners.items()}
    try:
        for path, owner in owners.items():
            for name in modules[path]:
                child = f"{path}.{name}" if path else name
                if child not in opened:
                    setattr(owner, name, _Placeholder(child, record))
        yield
    finally:
        for path, owner in owners.items():
            for name, module in modules[path].items():
                setattr(owner, name, module)
    for path, owner in owners.items():
        for key, value in list(vars(owner).items()):
            before = attributes[path].get(key)
            if value is not before and not (isinstance(value, _DECIDING) and value == before):
                vars(owner)[key] = before
                raise ConfigError(
                    f"the forward of {class_name(model)} sets {f'{path}.' * bool(path)}{key}, which no stage would do, "
                    "because this forward is divided: return it, or let a module of its own, within a stage, set it"
                )


def _children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in a module itself by name, one that has two names twice."""
    inner = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in inner if name and "." not in name}


def _line_of(error: Exception) -> str:
    """Return the line of the model that failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    last = frames[-1] if frames else None
    return f"{Path(last.filename).name}, line {last.lineno}, `{last.line}`: " if last and last.line else ""


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            arguments[name] = bound.arguments[name]
        elif bound.arguments[name]:
            raise ConfigError(
                f"self.model was called with {bound.arguments[name]!r:.80} for {name}, where the forward of "
                f"{type(model).__name__} names no parameter; name each input of the model there"
            )
    return arguments


def constants_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which a forward may decide: numbers, text and None."""
    return {name: entry for name, entry in values.items() if isinstance(entry, _DECIDING)}


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with the results of a function in the place of what its tuples, lists and dicts contain."""
    if type(value) in (tuple, list):
        return type(value)(map_leaves(function, item) for item in value)
    if type(value) is dict:
        return {key: map_leaves(function, entry) for key, entry in value.items()}
    return function(value)


def leaves_in(value: Any) -> list[Any]:
    """Return what tuples, lists and dicts contain."""
    leaves: list[Any] = []
    map_leaves(leaves.append, value)
    return leaves


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return dict(itertools.chain(*both))
