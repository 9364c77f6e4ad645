"""What the calls in a traced forward return for an example: their shapes decide what the forward does."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute

from zae.common.walk import map_tensors

__all__ = ["UNKNOWN", "HintedProxy", "Hints"]

UNKNOWN: Any = object()
_META = torch.device("meta")


class Hints:
    """The values of the nodes of a graph, with tensors on the meta device: nothing is computed.

    Parameters
    ----------
    arguments : mapping
        What the model is called with, by the names of its forward; empty where nothing is known.

    Attributes
    ----------
    are_used : bool
        Whether the forward has asked for a value: its graph is then that of these shapes.
    is_computing : bool
        Whether modules are called for their shapes alone.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.are_used = self.is_computing = False
        self._arguments = arguments
        self._values: dict[fx.Node, Any] = {}
        self._device = next((each.device for each in arguments.values() if isinstance(each, Tensor)), None)

    def note(self, node: fx.Node, module: nn.Module | None) -> None:
        """Compute the value of a new node; ``module`` is what it calls."""
        if not self._arguments:
            return
        self.is_computing = True
        try:
            with torch.no_grad(), _META:
                self._values[node] = self._value(node, module)
        except Exception:  # It has no value on the meta device, and then the forward cannot ask for it.
            self._values.pop(node, None)
        finally:
            self.is_computing = False

    def _value(self, node: fx.Node, module: nn.Module | None) -> Any:
        if node.op == "placeholder":
            return map_tensors(_on_meta, self._arguments[str(node.target)])
        args, kwargs = (map_arg(each, self._values.__getitem__) for each in (node.args, node.kwargs))
        args, kwargs = (_without_devices(map_tensors(_on_meta, each)) for each in (args, kwargs))
        if node.op == "call_module":
            assert module is not None
            held = {name: each.to(_META) for name, each in (*module.named_parameters(), *module.named_buffers())}
            before = [(vars(each), dict(vars(each))) for each in module.modules()]
            try:
                return functional_call(module, held, args, kwargs)
            finally:  # What a forward keeps on its module is not that of a step.
                for attributes, kept in before:
                    attributes.clear()
                    attributes.update(kept)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.target is getattr and args[1] == "device":
            return self._device
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node that is not a tensor, or UNKNOWN."""
        value = self._values.get(node, UNKNOWN)
        if value is UNKNOWN or isinstance(value, Tensor):
            return UNKNOWN
        self.are_used = True
        return value

    def constant(self, node: fx.Node) -> Any:
        """Return the value of a node that has no tensors, as sizes are, or UNKNOWN."""
        value = self._values.get(node, UNKNOWN)
        if value is UNKNOWN or not _is_constant(value):
            return UNKNOWN
        self.are_used = True
        return tuple(value) if isinstance(value, torch.Size) else value

    def length(self, node: fx.Node) -> int | None:
        """Return how many tensors a node returns in a tuple; None for a single one."""
        value: Any = self._values.get(node)
        is_tuple = isinstance(value, (tuple, list)) and all(isinstance(each, Tensor) for each in value)
        return len(value or ()) if is_tuple else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_constant, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device))


def _on_meta(value: Tensor) -> Tensor:
    return value.detach().to(_META)


def _without_devices(value: Any) -> Any:
    """Replace devices by the meta device, which everything is on here."""
    if isinstance(value, torch.device):
        return _META
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(map(_without_devices, value))
    return {key: _without_devices(each) for key, each in value.items()} if isinstance(value, dict) else value


class _Known:
    """Its length and its number are those for the example."""

    tracer: Any
    node: fx.Node

    def _value(self, kind: str) -> Any:
        value = self.tracer.hints.of(self.node)
        if value is UNKNOWN:
            raise TypeError(f"{kind} of a value that is not known before the model is called")
        return value

    def __len__(self) -> int:
        return len(self._value("the length"))

    def __index__(self) -> int:
        return int(self._value("the number"))

    __int__ = __index__


class HintedProxy(_Known, fx.Proxy):
    """A value in a traced forward."""

    def __getattr__(self, k: str) -> Any:
        if self.node.op == "get_attr" and k in ("dtype", "shape", "ndim"):  # Of a parameter, which is there.
            hints = cast(Any, self.tracer).hints
            hints.is_computing = True
            try:
                return getattr(operator.attrgetter(str(self.node.target))(self.tracer.root), k)
            finally:
                hints.is_computing = False
        return _HintedAttribute(self, k)


class _HintedAttribute(_Known, Attribute):
    def __getattr__(self, k: str) -> Any:
        return _HintedAttribute(self, k)
