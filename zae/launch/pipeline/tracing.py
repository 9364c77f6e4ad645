"""Trace the forward of a model as a graph of calls, in which the modules of a stage are single calls."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from zae.common.torch_private import call_hooks
from zae.errors import ConfigError

__all__ = ["REMEDY", "bind", "constants_in", "defaults_of", "trace"]

REMEDY = (
    "Let the computation be in a module of its own, which is not traced, or give split=a function of the model and of "
    "the number of stages that returns the modules of the stages in their order; each is called with what the one "
    "before returns"
)
_DECIDING = (bool, int, float, str, type(None))
_CALLS = ("call_function", "call_method", "call_module", "get_attr")


class _Tracer(fx.Tracer):
    """Records calls; the forward of the opened modules is traced, and all others are single calls."""

    def __init__(self, opened: Collection[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self._opened, self._constants, self._within, self._modes = opened, constants, [""], _modes()
        self.begins: dict[str, fx.Node] = {}  # The first call within each module.

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        root, positional, named = self.root, list[Any](), dict[str, Any]()
        for name, each in inspect.signature(root.forward).parameters.items():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                continue
            held = name in self._constants
            value = self._constants[name] if held else self.create_proxy("placeholder", name, (), {})
            if each.kind is each.KEYWORD_ONLY:
                named[name] = value
            else:
                positional.append(value)

        def call() -> Any:
            return root.forward(*positional, **named)

        return call, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        if name in self._opened:
            check_hooks(m, name)
        self._within.append(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._within.pop()

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        if kind in _CALLS:
            for name in self._within:
                self.begins.setdefault(name, node)
            if _modes() != self._modes:
                raise ConfigError(
                    f"the forward of {type(self.root).__name__} computes {node.name} under no_grad or autocast, which "
                    f"a stage would leave out. {REMEDY}"
                )
        return node


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def check_hooks(module: nn.Module, name: str) -> None:
    """Refuse hooks of a module whose forward is divided: no stage would call them."""
    if kind := call_hooks(module):
        raise ConfigError(
            f"{name or 'the model'} ({type(module).__name__}) has a {kind}, which no stage would call, because its "
            "forward is divided; remove it, or register it on a module within a stage"
        )


def trace(
    model: nn.Module, opened: Collection[str], constants: Mapping[str, Any]
) -> tuple[fx.Graph, dict[str, fx.Node], dict[str, Any]]:
    """Return the graph of a forward, the first node within each module, and tensors that the forward makes itself.

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
    check_hooks(model, "")
    tracer, before, streams = _Tracer(opened, constants), set(vars(model)), torch.get_rng_state()
    made: dict[str, Any] = {}
    try:
        graph = tracer.trace(model)
    except ConfigError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
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
    return graph, tracer.begins, made


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
    """Return the arguments that a call may leave out, by which the forward may decide."""
    parameters = inspect.signature(model.forward).parameters.items()
    return constants_in({name: each.default for name, each in parameters})
