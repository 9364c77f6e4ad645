"""The parts of a trainer that an add-on may replace: what each of them answers, with a default that does nothing.

A trainer has one object of each from its constructor on. An add-on puts its own in, and asks that of another add-on,
which it does not know, by the methods and attributes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zae.common.null_context import NULL_CONTEXT

__all__ = ["Precision", "StepWindow"]


class Precision:
    """In which type a step computes, what its loss is scaled by, and which type the weights have.

    Here: the forward is left as it is, and nothing is scaled. An engine that computes in a type of its own puts one in
    that says so, ``Precision("bf16")``.

    Parameters
    ----------
    name : {"fp32", "bf16", "fp16"}
        The type in which the forward computes; "fp32" is that of the weights.
    weights : torch.dtype, optional
        The type that the weights of the model were converted to; None leaves each as it is.

    Attributes
    ----------
    is_scaled : bool
        Whether the loss is scaled in this run. A step whose gradients overflow is then left out, and is no error.
    """

    def __init__(self, name: str = "fp32", weights: torch.dtype | None = None) -> None:
        self.name, self.weights = name, weights

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled in this run."""
        return False

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a new context for a forward and its loss."""
        return NULL_CONTEXT

    def scale(self, loss: Any) -> Any:
        """Return a loss, or a dict of them, as it is differentiated."""
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of optimizers by the scale, once in a step, and note which of them overflowed."""

    def found_inf(self, optimizer: Optimizer) -> list[Tensor]:
        """Return what `unscale` has noted: a tensor on each device, above 0 where a gradient is not finite."""
        return []

    def combine_found_inf(self, optimizers: Iterable[Optimizer], reduce: Callable[[Tensor], Tensor]) -> None:
        """Let an overflow of one rank be one of all of them, where each has other gradients.

        Parameters
        ----------
        optimizers : iterable of Optimizer
            Those of the step, in one order on all ranks.
        reduce : callable
            Sums a tensor over the ranks.
        """
        for optimizer in optimizers:
            for flag in self.found_inf(optimizer):
                flag.copy_(reduce(flag).clamp(max=1))

    def step(self, optimizer: Optimizer) -> bool:
        """Step an optimizer; return False where an overflow forbids it."""
        optimizer.step()
        return True

    def update(self) -> None:
        """Choose the scale of the next step, when all optimizers have stepped or the step is left out."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues with; empty where there is nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what ``state_dict`` returned."""


class StepWindow:
    """How many batches of a rank's loader make an optimizer step, and how often its gradients are computed.

    Attributes
    ----------
    batches : int
        The batches of a step, unless ``samples`` is given.
    samples : int or None
        The samples of a step over all ranks: how many batches these are, `batches_of` says.
    is_repeated : bool
        Whether the gradients of the present step are computed more than once, so that its batches are needed again.
    may_restart : bool
        Whether a step begins again, in parts, when memory has run out.
    restarts : int
        How often that has happened.
    """

    batches: int = 1
    samples: int | None = None
    is_repeated: bool = False
    may_restart: bool = False
    restarts: int = 0

    def batches_of(self, batch_size: int | None, ranks: int) -> int | None:
        """Return how many batches make a step of a loader, before it has begun.

        Parameters
        ----------
        batch_size : int or None
            The samples of its batches on each rank; None is unknown.
        ranks : int
            How many ranks have other batches.

        Returns
        -------
        int or None
            None where that is not known yet.
        """
        return self.batches
