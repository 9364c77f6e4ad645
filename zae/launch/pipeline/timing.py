"""Measure how long each call in the forward of a model takes, with its backward."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from zae.common import random_state
from zae.common.walk import map_tensors, tensors_in
from zae.errors import ConfigError
from zae.launch.pipeline.tracing import bind

__all__ = ["as_arguments", "measure"]

_RUNS = 4  # The first one allocates memory.


def as_arguments(model: nn.Module, example: Any) -> dict[str, Any]:
    """Return an example as arguments of the model: a dict is by name, a tuple by position, else it is the first one."""
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
    try:
        return bind(model, args if isinstance(args, tuple) else (args,), kwargs)
    except TypeError as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ConfigError:
    text = str(error).strip().partition("\n")[0]
    return ConfigError(
        f"the model cannot be called with pipeline_example ({type(error).__name__}: {text:.200}); give what train_step "
        "calls it with: a tensor, a tuple of several, or a dict by the names of the forward"
    )


def measure(module: fx.GraphModule, values: Mapping[str, Any]) -> dict[fx.Node, float]:
    """Return the seconds of each node, forward and backward, at the fastest of several runs.

    Buffers and random streams are as before.

    Parameters
    ----------
    module : GraphModule
        The traced model.
    values : mapping
        The arguments of the model by name.
    """
    kept = [(each, each.detach().clone()) for each in module.buffers()]
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    found: dict[fx.Node, float] = {}
    inputs = [map_tensors(lambda each: each.to(device), values[each.target]) for each in module.graph.nodes
              if each.op == "placeholder"]  # fmt: skip
    try:
        with random_state.isolated():
            for _ in range(_RUNS):
                timed = _Timed(module, device)
                timed.run(*inputs, enable_io_processing=False)
                found = {node: min(seconds, found.get(node, seconds)) for node, seconds in timed.seconds.items()}
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _refusal(error) from error
    finally:
        with torch.no_grad():
            for each, before in kept:
                each.copy_(before)
    return found


class _Timed(fx.Interpreter):
    """Runs one node after the other, each with its backward."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._device = device
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        begin = self._now()
        value = super().run_node(n)
        results = [each for each in tensors_in(value) if each.requires_grad]
        held = [self.fetch_attr(str(n.target))] if n.op == "call_module" else []
        sources = [each for module in held for each in module.parameters() if each.requires_grad]
        sources += [each for node in n.all_input_nodes for each in tensors_in(self.env[node]) if each.requires_grad]
        if results and sources and n.op != "get_attr":
            torch.autograd.grad(results, sources, [torch.ones_like(each) for each in results], allow_unused=True)
        self.seconds[n] = self._now() - begin
        return value if n.op == "get_attr" else map_tensors(_cut, value)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _cut(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.requires_grad else value
