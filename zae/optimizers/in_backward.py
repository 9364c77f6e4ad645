"""Step each parameter in the backward, as soon as its gradient is complete, and free the gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zae.errors import StepError

__all__ = ["BackwardSteps", "step_alone"]


class BackwardSteps:
    """Hooks of parameters that step each of them in a backward.

    The optimizers stay as they are: for a step of one parameter, the groups of its optimizer hold that parameter alone.
    Its state and the settings of its group are those that a step of all parameters would use, so that schedulers and
    states need nothing further.

    Parameters
    ----------
    optimizers : mapping of str to Optimizer
        Those that are stepped; groups and parameters may be added to them later.
    step : callable
        Steps an optimizer.
    names : callable
        Returns the name of a parameter, for errors.

    Attributes
    ----------
    has_begun : bool
        Whether some parameters have stepped, and `finish` was not called since.
    watch : callable, optional
        Called with each parameter while its gradient is there, before the step.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        step: Callable[[Optimizer], Any],
        names: Callable[[Tensor], str],
    ) -> None:
        self.optimizers, self._step, self._names = optimizers, step, names
        self.has_begun = False
        self.watch: Callable[[Tensor], None] | None = None
        self._handles: dict[int, tuple[Tensor, Any]] = {}
        self._places: dict[int, tuple[Optimizer, int]] = {}  # The optimizer and the index of the group, in a backward.
        self._stepped: set[int] = set()
        self._orders: list[tuple[Optimizer, list[Tensor]]] = []  # Of the states, before a backward.
        self._lock = threading.Lock()  # Autograd has a thread for each device.

    def parameters(self) -> Iterator[tuple[Tensor, Optimizer, int]]:
        """Yield each parameter that gets a gradient, with its optimizer and the index of its group."""
        for optimizer in self.optimizers.values():
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if parameter.requires_grad and not nn.parameter.is_lazy(parameter):
                        yield parameter, optimizer, index

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Step each parameter in the backward of the block; gradients of any other backward are left alone."""
        for parameter, optimizer, index in self.parameters():
            self._places[id(parameter)] = optimizer, index
            if id(parameter) not in self._handles:  # It may have been frozen, or added to an optimizer.
                hook = parameter.register_post_accumulate_grad_hook(self._hook)
                self._handles[id(parameter)] = parameter, hook
        self._orders = [(each, [*each.state]) for each in self.optimizers.values()]
        try:
            yield
        finally:
            self._places, self._stepped = {}, set()

    def finish(self) -> None:
        """Note that the step is complete, and put the states into the order that a step of all parameters makes."""
        self.has_begun = False
        for optimizer, before in self._orders:
            held = [each for group in optimizer.param_groups for each in group["params"]]
            ordered = [each for each in dict.fromkeys((*before, *held)) if each in optimizer.state]
            if any(each is not other for each, other in zip(ordered, optimizer.state)):
                for each in ordered:
                    optimizer.state[each] = optimizer.state.pop(each)
        self._orders = []

    def remove(self) -> None:
        """Remove the hooks."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles, self.has_begun = {}, False

    def _hook(self, parameter: Tensor) -> None:
        """Step a parameter whose gradient is complete."""
        place = self._places.get(id(parameter))
        if place is None:
            return
        with self._lock:
            if id(parameter) in self._stepped:
                raise StepError(
                    f"the gradient of {self._names(parameter)} came twice in one backward, after its step was made: "
                    "some of the model is differentiated in a backward within the backward, as "
                    "torch.utils.checkpoint(..., use_reentrant=True) does. Write use_reentrant=False (in Transformers "
                    "gradient_checkpointing_kwargs={'use_reentrant': False}), or leave StepInBackwardAddon out"
                )
            self._stepped.add(id(parameter))
            if self.watch is not None:
                self.watch(parameter)
            self.has_begun = True
            step_alone(*place, parameter, self._step)
            parameter.grad = None


def step_alone(optimizer: Optimizer, index: int, parameter: Tensor, step: Callable[[Optimizer], Any]) -> None:
    """Step one parameter, of the group of an index."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[index], "params": [parameter]}]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups


def name_of(parameter: Tensor, named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name of a parameter among those of a model."""
    return next((name for name, each in named if each is parameter), "a parameter outside of the model")
