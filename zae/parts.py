"""The parts of a trainer that an add-on may replace: what each of them answers, with a default that does nothing.

A trainer has one object of each from its constructor on. An add-on puts its own in, and asks that of another add-on,
which it does not know, by the methods and attributes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from zae.model.weights import load_fitted
from zae.null_context import NULL_CONTEXT
from zae.optim.gradients import gradient_norm

AnyEngine = TypeVar("AnyEngine", bound="SingleProcess")

__all__ = ["Engine", "Precision", "SingleProcess", "StepWindow", "gather_dp"]


class SingleProcess:
    """The processes that train together, how data and parameters lie on them, and how gradients come together.

    Here: one process, which has all of the data and the whole model. `zae.distributed.ranks.RanksEngine` is that of
    several ones that have joined, and an `Engine` is around it. None of them knows a trainer: a test makes one in a
    process group of its own.

    Attributes
    ----------
    rank : int
        The number of this process among those that train.
    world_size : int
        How many processes train.
    dp_rank : int
        The number of this process's share of the data; processes with the same number get equal batches.
    dp_world_size : int
        The number of shares of the data; at most ``world_size``.
    needs_lockstep_forward : bool
        Whether each forward is a collective: a rank without a batch then takes part with one of weight 0.
    can_save_alone : bool
        Whether a rank can save the state without the others, after an error.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_world_size: int = 1
    needs_lockstep_forward: bool = False
    can_save_alone: bool = True

    def find(self, kind: type[AnyEngine]) -> AnyEngine | None:
        """Return the engine of a class, this one or one inside of it; None where there is none."""
        return self if isinstance(self, kind) else None

    # --------------------------------------------------------------------- collectives: every rank makes the same calls

    def reduce(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks; the tensor itself is not changed."""
        return value

    def gather(self, value: Any, *, in_background: bool = False) -> list[Any]:
        """Return a value of every rank, in their order; anything that pickle takes.

        Parameters
        ----------
        value : object
            The value of this rank.
        in_background : bool
            Exchange it over a connection of its own: a thread may call it while the loop exchanges other values.
        """
        return [value]

    def rendezvous(self, call: str) -> None:
        """Wait until every rank makes this call of a user; before it, no rank has exchanged any tensor for it."""

    # ------------------------------------------------------------------------------------------------------- a run

    def wrap(self, module: nn.Module, trains: bool) -> Any:
        """Return what a step calls as the model: the module itself, changed in place or not, or what is around it.

        A module that is changed in place is changed once: a later run finds it as it is. Where parameters are replaced,
        the new ones have the names of the old ones. Every rank calls it, with the same module.

        Parameters
        ----------
        module : Module
            The model, on the device of this rank.
        trains : bool
            Whether it is to be trained, and not only evaluated.
        """
        return module

    def begin(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Give every rank the values of rank 0, before the first step of a run.

        Parameters
        ----------
        module : Module
            The model, as it lies on this rank, with its buffers.
        parameters : sequence of Tensor
            What the optimizers train: of the model, and others.
        """

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Enclose the forward and the backward of a micro-batch.

        Gradients may be averaged in the backward of the last one of a step; until then, each rank adds up its own.
        """
        return NULL_CONTEXT

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Leave in each ``.grad``, or in this rank's part of it, the mean over the shares of the data.

        It is called once in a step, after the last backward. Where the backward itself has averaged some gradients, the
        others are averaged here. A rank without samples has None in each ``.grad``, and counts as zeros. A gradient
        that no rank has stays None.

        Parameters
        ----------
        parameters : sequence of Tensor
            What the optimizers train, the same on every rank, in one order.
        """

    def sync_buffers(self, module: nn.Module) -> None:
        """Give every rank the buffers of rank 0, when the forwards of a step, which may change them, are over."""

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of these parameters, over all parts of them: equal on all ranks."""
        return gradient_norm(parameters)

    # ------------------------------------------------------------------ the state, in the parts that this rank holds

    def full_tensors(self, value: Any, keeps: bool = True) -> Any:
        """Return a tensor, or dicts, lists and tuples of them, with all parts of each. All ranks call it, in one order.

        What was gathered is in the memory of the host: a device needs room for one whole tensor at a time, not for all.

        Parameters
        ----------
        value : object
            Contains tensors of which this rank may have a part, or none.
        keeps : bool
            Whether this rank needs them: otherwise what was gathered is on the meta device.
        """
        return value

    def load_model_state(self, module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load whole weights that fit the module, given under its own keys; this rank keeps its part of them."""
        load_fitted(module, weights, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, with an entry for each parameter that any rank has; all ranks call it."""
        return optimizer.state_dict()


if TYPE_CHECKING:
    _Interface = SingleProcess
else:
    _Interface = object


class Engine(_Interface):
    """An engine around another one: what it does not define is answered by ``inner``.

    A new engine defines of `SingleProcess` what it does in another way, and calls the same of ``self.inner`` for the
    rest.

    Examples
    --------
    >>> import torch
    >>> from zae.parts import Engine, SingleProcess
    >>> class Doubled(Engine):
    ...     "Count every number twice."
    ...     def reduce(self, value):
    ...         return 2 * self.inner.reduce(value)
    >>> engine = Doubled(SingleProcess())
    >>> engine.world_size, engine.reduce(torch.tensor(3.0))
    (1, tensor(6.))
    """

    def __init__(self, inner: SingleProcess) -> None:
        self.inner = inner

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "inner" or name.startswith("__"):  # A copy has no engine inside yet.
                raise AttributeError(name)
            return getattr(self.inner, name)

    def find(self, kind: type[AnyEngine]) -> AnyEngine | None:
        """Return the engine of a class, this one or one inside of it; None where there is none."""
        return self if isinstance(self, kind) else self.inner.find(kind)


def gather_dp(engine: SingleProcess, value: Any) -> list[Any]:
    """Return a value of one rank of each share of the data, in their order; all ranks call it.

    Ranks with the same batches have the same value: the first of each share speaks for the others.
    """
    values: dict[int, Any] = {}
    for dp_rank, part in engine.gather((engine.dp_rank, value)):
        values.setdefault(dp_rank, part)
    return [values[dp_rank] for dp_rank in sorted(values)]


class Precision:
    """In which type a step computes, and what its loss is scaled by.

    Here: the forward is left as it is, and nothing is scaled. An engine that computes in a type of its own puts one in
    that says so, ``Precision("bf16")``.

    Parameters
    ----------
    name : {"fp32", "bf16", "fp16"}
        The type in which the forward computes; "fp32" is that of the weights.

    Attributes
    ----------
    is_scaled : bool
        Whether the loss is scaled in this run. A step whose gradients overflow is then left out, and is no error.
    """

    is_scaled = False

    def __init__(self, name: str = "fp32") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

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
    """

    batches: int = 1
    samples: int | None = None

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
