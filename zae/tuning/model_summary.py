"""`summary`: the layers of a model with their output shapes, parameters and memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zae import random_state
from zae.device import to_device
from zae.display.text import format_size
from zae.errors import ConfigError, kind_of
from zae.model.copying import deep_copy
from zae.optim import has_lazy
from zae.trainer import Trainer
from zae.tuning.copies import copy_trainer
from zae.values.walk import tensors_in

__all__ = ["Layer", "ModelSummary", "summary"]


@dataclass
class Layer:
    """A module of a model: its name, class, output shapes and own parameters, without those of its children."""

    name: str
    kind: str
    depth: int
    parameters: int = 0
    trainable: int = 0
    shared_with: str = ""
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    calls: int = 0
    is_lazy: bool = False


@dataclass
class ModelSummary:
    """The layers of a model; it prints as a table.

    Attributes
    ----------
    name : str
        The class of the model.
    layers : list of Layer
        In the order of ``named_modules()``.
    parameters, trainable : int
        Numbers of all parameters; a shared one is counted once. Of a model in parts on several ranks, of the whole.
    parameter_bytes, buffer_bytes : int
        Their memory.
    activation_bytes : int or None
        The memory that a forward keeps for the backward, of the batch; None without one.
    is_lazy : bool
        Whether some parameters have no shape yet: they are not counted.
    """

    name: str
    layers: list[Layer]
    parameters: int = 0
    trainable: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    activation_bytes: int | None = None
    is_lazy: bool = False

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return the rows of the table, for each layer: its name, class, output shape, parameters, and remarks."""
        called = {part for layer in self.layers if layer.calls for part in _parents(layer.name)}
        tried = self.activation_bytes is not None
        table = []
        for layer in self.layers:
            shape = ", ".join(str(list(shape)) for shape in layer.outputs) or "-"
            remarks = [f"shared with {layer.shared_with}"] if layer.shared_with else []
            remarks += ["lazy"] if layer.is_lazy else []
            remarks += ["not called"] if tried and layer.name not in called else []
            remarks += [f"called {layer.calls} times"] if layer.calls > 1 else []
            if layer.parameters and layer.trainable < layer.parameters:
                remarks.append(f"{layer.trainable:,} trainable" if layer.trainable else "frozen")
            name = "  " * layer.depth + (layer.name.rpartition(".")[2] or self.name)
            kind = layer.kind if layer.name else ""
            table.append((name, kind, shape, f"{layer.parameters:,}" if layer.parameters else "-", "; ".join(remarks)))
        return table

    def totals(self) -> list[tuple[str, str]]:
        """Return the lines below the table: a title and a text each."""
        lazy = " without the lazy ones, which the first batch makes" if self.is_lazy else ""
        lines = [
            ("parameters", f"{self.parameters:,}{lazy}, {self.trainable:,} trainable"),
            ("memory", f"parameters {format_size(self.parameter_bytes)}, buffers {format_size(self.buffer_bytes)}"),
        ]
        if self.activation_bytes is not None:
            lines.append(("activations", f"{format_size(self.activation_bytes)} kept for the backward of this batch"))
        return lines

    def __str__(self) -> str:
        table = [("layer", "class", "output", "parameters", ""), *self.rows()]
        widths = [max(len(row[at]) for row in table) for at in range(4)]
        lines = [
            f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip()
            for a, b, c, d, e in table
        ]
        width = max(len(title) for title, _ in self.totals())
        return "\n".join([*lines, "", *(f"{title:<{width}}  {text}" for title, text in self.totals())])

    __repr__ = __str__


def summary(model: nn.Module | Trainer, batch: Any = None) -> ModelSummary:
    """Summarize a model: its layers, their parameters, and with a batch their output shapes and the activations.

    The batch goes through a copy of the model, in the modes that the modules have: the model, its buffers and hooks and
    all random streams stay as they were.

    Parameters
    ----------
    model : Module or Trainer
        A trainer's model, without what wraps it.
    batch : object, optional
        Of a module, its input: a tuple or list is its positional arguments, a dict its keyword arguments. Of a trainer,
        a batch as ``train_step`` takes it.

    Returns
    -------
    ModelSummary
        It prints as a table.

    Raises
    ------
    ConfigError
        ``model`` is something else; a batch is given, and the model lies in parts on several ranks, or cannot be
        copied.

    Examples
    --------
    >>> import torch, zae
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> zae.summary(model, torch.ones(4, 8))
    layer       class   output   parameters
    Sequential          [4, 2]            -
      0         Linear  [4, 16]         144
      1         ReLU    [4, 16]           -
      2         Linear  [4, 2]           34
    <BLANKLINE>
    parameters   178, 178 trainable
    memory       parameters 712 bytes, buffers 0 bytes
    activations  384 bytes kept for the backward of this batch
    """
    trainer = model if isinstance(model, Trainer) else None
    module = trainer.unwrap() if trainer is not None else model
    if not isinstance(module, nn.Module):
        raise ConfigError(f"summary takes a torch.nn.Module or a trainer, found {kind_of(model)}")
    if batch is None:
        return _describe(module)
    with random_state.isolated():
        twin, forward = _copy(module, trainer)
        calls = _Calls(twin)
        batch = copy.deepcopy(batch)
        with calls, torch.enable_grad():
            forward(batch)
        described = _describe(twin)
    # Parameters that the batch has made are counted.
    described.activation_bytes = calls.kept_bytes(twin)
    for layer in described.layers:
        layer.calls, layer.outputs = calls.of(layer.name)
    return described


def _copy(module: nn.Module, trainer: Trainer | None) -> tuple[nn.Module, Any]:
    """Return a copy of the model, and a function that sends a batch through it."""
    try:
        if trainer is not None:
            twin = copy_trainer(trainer)
            return twin.unwrap(), lambda batch: _train_step(twin, batch)
        copied = deep_copy(module)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied for a batch ({error}); write summary(model), without one"
        ) from error
    place = next((parameter.device for parameter in copied.parameters()), torch.device("cpu"))
    return copied, lambda batch: _forward(copied, to_device(batch, place))


def _train_step(twin: Any, batch: Any) -> None:
    twin.model.to(twin.device)
    with twin.forward_context():
        twin.train_step(twin.to_device(batch))


def _forward(module: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, (tuple, list)):
        module(*batch)
    else:
        module(batch)


class _Calls:
    """Hooks on a copy of a model that record the calls of its modules, and what autograd keeps of them."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {each: name for name, each in module.named_modules()}
        self.outputs: dict[str, tuple[int, list[tuple[int, ...]]]] = {}
        self.storages: dict[int, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for module, name in self.names.items():

            def record(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                count, _ = self.outputs.get(name, (0, []))
                self.outputs[name] = count + 1, [tuple(tensor.shape) for tensor in tensors_in(output)]

            self._stack.callback(module.register_forward_hook(record).remove)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda value: value))

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage  # Held, so that no other one gets its address.
        return tensor

    def kept_bytes(self, module: nn.Module) -> int:
        """Return the bytes that autograd keeps beside parameters and buffers."""
        addresses = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers())}
        return sum(storage.nbytes() for at, storage in self.storages.items() if at not in addresses)

    def of(self, name: str) -> tuple[int, list[tuple[int, ...]]]:
        """Return the calls of a module, and the shapes of its last output."""
        return self.outputs.get(name, (0, []))


def _parents(name: str) -> list[str]:
    """Return a name of a module, and those of the modules that it is in."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _describe(module: nn.Module) -> ModelSummary:
    """Describe the modules; a parameter is counted where it is first."""
    described = ModelSummary(type(module).__name__, [])
    places: dict[int, str] = {}
    for name, submodule in module.named_modules():
        layer = Layer(name, type(submodule).__name__, name.count(".") + bool(name))
        described.layers.append(layer)
        for parameter_name, parameter in submodule.named_parameters(recurse=False):
            if has_lazy([parameter]):
                layer.is_lazy = True
                described.is_lazy = True
            elif id(parameter) in places:
                layer.shared_with = places[id(parameter)]
            else:
                places[id(parameter)] = f"{name}.{parameter_name}".lstrip(".")
                layer.parameters += parameter.numel()
                layer.trainable += parameter.numel() * parameter.requires_grad
                described.parameter_bytes += parameter.numel() * parameter.element_size()
    described.parameters = sum(layer.parameters for layer in described.layers)
    described.trainable = sum(layer.trainable for layer in described.layers)
    described.buffer_bytes = sum(b.numel() * b.element_size() for b in module.buffers() if not has_lazy([b]))
    return described
