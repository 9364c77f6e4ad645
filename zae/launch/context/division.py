"""The positions of a sequence that each rank has, and tensors that are gathered along it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zae.errors import ConfigError

__all__ = ["Division", "Ranks"]

# Under the names that torch has had since 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """The ranks that divide a sequence.

    Attributes
    ----------
    group : ProcessGroup
        Their process group.
    size, rank : int
        How many there are, and the number of this one among them.
    is_differentiating : bool
        Whether the trainer differentiates the loss of a step, and not the step itself.
    compares : bool
        Whether the next gradients of what the model returned are compared between the ranks.
    """

    def __init__(self, group: Any, fingerprint: Callable[[Iterable[Tensor]], str]) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._fingerprint = fingerprint
        self.is_differentiating = self.compares = False

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all of these ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def have_same(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all of these ranks have the same tensors; all of them ask."""
        return len(set(self.gather_objects(self._fingerprint(tensors)))) == 1

    def check_differentiates(self) -> None:
        """Refuse gradients that a step computes itself: they would be those of a part of the sequence."""
        if not self.is_differentiating:
            raise ConfigError(
                "train_step differentiates what the model returned (torch.autograd.grad), and a rank has the gradient "
                "of its part of the sequence alone; leave the penalty out, or train without ContextParallelAddon"
            )


class Division:
    """How a sequence is divided: a rank has a chunk of its first half, and the mirrored one of its second half.

    So each rank has as much of a causal attention to compute as the others. A sequence that cannot be divided evenly is
    padded with its last position.

    Parameters
    ----------
    length : int
        The length of the sequence.
    ranks : Ranks
        The ranks that divide it.
    """

    def __init__(self, length: int, ranks: Ranks) -> None:
        self.length, self.ranks = length, ranks
        self.chunk = max(1, -(-length // (2 * ranks.size)))
        self.chunk += 2 * self.chunk == length  # A part is not as long as the whole, so that they can be told apart.
        self.local = 2 * self.chunk
        self.starts = (ranks.rank * self.chunk, (2 * ranks.size - 1 - ranks.rank) * self.chunk)
        self._positions: dict[torch.device, Tensor] = {}
        self._masks: dict[Any, Tensor] = {}

    @property
    def is_padded(self) -> bool:
        """Whether the parts are longer together than the sequence."""
        return 2 * self.ranks.size * self.chunk != self.length

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank; those of the padding are the last one."""
        if device not in self._positions:
            chunks = [torch.arange(start, start + self.chunk, device=device) for start in self.starts]
            self._positions[device] = torch.cat(chunks).clamp_(max=self.length - 1)
        return self._positions[device]

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor."""
        return tensor.index_select(dim, self.positions(tensor.device))

    def gather(self, tensor: Tensor, dim: int, *, is_output: bool = False) -> Tensor:
        """Return the parts of all ranks in the order of the sequence, without the padding.

        The gradient of an output is that of a loss which each rank computes alike; of other tensors the ranks add up
        theirs.
        """
        dim %= tensor.dim()
        made: Tensor = (_GatherOutput if is_output else _Gather).apply(tensor, dim, self)
        return made.narrow(dim, 0, self.length)

    def mask(self, start: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what is added to the scores of a chunk's positions, for those that come after each of them."""
        key = (start, dtype, device)
        if key not in self._masks:
            after = torch.full((self.chunk, self.chunk), -torch.inf, dtype=dtype, device=device).triu_(1)
            before = torch.zeros(self.chunk, start, dtype=dtype, device=device)
            self._masks[key] = torch.cat([before, after], dim=1)
        return self._masks[key]


def _gather(tensor: Tensor, dim: int, division: Division) -> Tensor:
    """Gather without a gradient; the padding stays."""
    sent = tensor.contiguous()
    sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
    ranks, chunk = division.ranks, division.chunk
    found = sent.new_empty((ranks.size, *sent.shape))
    _all_gather(found.flatten(0, 1) if sent.dim() else found, sent, group=ranks.group)
    first = [each.narrow(dim, 0, chunk) for each in found]
    second = [each.narrow(dim, chunk, chunk) for each in reversed([*found])]
    made = torch.cat([*first, *second], dim)
    return made.view(torch.bool) if tensor.dtype == torch.bool else made


def _parts(gradient: Tensor, dim: int, division: Division, rank: int) -> list[Tensor]:
    """Return the two chunks of a rank."""
    chunk = division.chunk
    return [gradient.narrow(dim, place * chunk, chunk) for place in (rank, 2 * division.ranks.size - 1 - rank)]


class _Gather(torch.autograd.Function):
    """Gather along the sequence; the ranks add up the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, division: Division) -> Tensor:
        ctx.dim, ctx.division = dim, division
        return _gather(tensor, dim, division)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        division: Division = ctx.division
        ranks = division.ranks
        ranks.check_differentiates()
        sent = torch.stack(
            [torch.cat(_parts(gradient, ctx.dim, division, rank), ctx.dim) for rank in range(ranks.size)]
        )
        own = torch.empty_like(sent[0])
        _reduce_scatter(own, sent.flatten(0, 1), group=ranks.group)
        return own, None, None


class _GatherOutput(torch.autograd.Function):
    """Gather what the model returned; the loss of all of it is the same on each rank.

    The gradients of parameters are then averaged over the ranks, of which each has those of its part: so this one is
    multiplied by their number. A gradient that reaches parameters in another way, by a penalty, is whole on each rank.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, division: Division) -> Tensor:
        ctx.dim, ctx.division, ctx.compares = dim, division, division.ranks.compares
        return _gather(tensor, dim, division)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        division: Division = ctx.division
        ranks = division.ranks
        ranks.check_differentiates()
        if ctx.compares:
            _compare(gradient, ranks)
        own = torch.cat(_parts(gradient, ctx.dim, division, ranks.rank), ctx.dim)
        return own.mul_(ranks.size), None, None


def _compare(gradient: Tensor, ranks: Ranks) -> None:
    """Refuse losses that differ between the ranks of a sequence."""
    norms = ranks.gather_objects(float(torch.linalg.vector_norm(gradient.detach().float())))
    if max(norms) - min(norms) > 1e-2 * max(norms):
        raise ConfigError(
            f"the ranks that divide a sequence have computed different losses of it (the norms of their gradients are "
            f"{', '.join(f'{each:.4g}' for each in norms)}); let train_step compute the same on each, of data_rank and "
            "not of rank, and draw from torch, numpy.random or random, whose streams these ranks share"
        )
