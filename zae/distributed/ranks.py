"""RanksEngine: the engine of several processes that have joined, without a word on how they divide a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zae.distributed.collectives import all_reduce, gather_objects
from zae.distributed.drift import CollectiveCalls
from zae.distributed.launcher import launched_world
from zae.distributed.mesh import Mesh
from zae.errors import DistributedError
from zae.parts import SingleProcess

__all__ = ["NotJoined", "RanksEngine"]


class NotJoined(SingleProcess):
    """The engine of a process before it joins the others: under a launcher it knows its number, and works alone.

    Parameters
    ----------
    sizes : mapping of str to int
        How many ranks divide the work along each dimension, as the option ``mesh`` says it.
    dimensions : sequence of str
        The dimensions along which they may.
    """

    def __init__(self, sizes: Mapping[str, int], dimensions: Sequence[str]) -> None:
        super().__init__()
        self._sizes = dict(sizes)
        self._dimensions = list(dimensions)

    @property
    def rank(self) -> int:
        launched = launched_world()
        return 0 if launched is None else launched[0]

    @property
    def world_size(self) -> int:
        launched = launched_world()
        return 1 if launched is None else launched[1]

    @property
    def dp_rank(self) -> int:
        return self._mesh().dp_rank(self.rank)

    @property
    def dp_world_size(self) -> int:
        return self._mesh().dp_world_size

    def _mesh(self) -> Mesh:
        return Mesh(self._sizes, self._dimensions, self.world_size)


class RanksEngine(SingleProcess):
    """The engine of the processes of a process group, each with a whole model of its own.

    Parameters
    ----------
    mesh : Mesh
        How the ranks are arranged.
    timeout : float
        Seconds after which a rank that does not answer is given up.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        super().__init__()
        self.mesh = mesh
        self.timeout = timeout
        self._rank = dist.get_rank()
        self._dp_rank = mesh.dp_rank(self._rank)
        self._background: Any = None  # The process group of `gather_in_background`.

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which makes a process group of its own."""
        return {**vars(self), "_background": None}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self.mesh.world

    @property
    def dp_rank(self) -> int:
        return self._dp_rank

    @property
    def dp_world_size(self) -> int:
        return self.mesh.dp_world_size

    def reduce(self, value: Tensor) -> Tensor:
        # All ranks add up a copy of the tensor, which they get in its place.
        total = value.clone()
        with self._explaining_silence():
            all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        # Each rank sends its value to all others, as bytes of pickle.
        with self._explaining_silence():
            return gather_objects(value)

    def gather_dp(self, value: Any) -> list[Any]:
        # RanksEngine with the same batches have the same value: the first of each share speaks for the others.
        values = self.gather(value)
        if self.dp_world_size == self.world_size:
            return values
        return [values[rank] for rank in self.mesh.dp_leaders()]

    def gather_in_background(self, value: Any) -> list[Any]:
        # In a process group of its own, so that what the loop exchanges meanwhile does not come between. The first call
        # makes the group, which all ranks do at the same place of their loops.
        try:
            if self._background is None:
                self._background = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
            return gather_objects(value, self._background)
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} of {self.world_size}: another rank has ended, or did not answer within the "
                f"timeout of {self.timeout:g} s, while a checkpoint was written; resume from the one before"
            ) from error

    def barrier(self) -> None:
        # A sum can only be known when every rank has given its part.
        self.reduce(torch.zeros(1))

    def rendezvous(self, call: str) -> None:
        # The ranks compare the name of the call over the store of the group, before they exchange any tensor for it.
        CollectiveCalls.rendezvous(call, self.timeout)

    @contextmanager
    def _explaining_silence(self) -> Iterator[None]:
        """Add to the error of a timeout what some ranks may have called alone."""
        try:
            yield
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                error.add_note(
                    f"zae: rank {self.rank} of {self.world_size} waited for the others. Call state_dict, save_model "
                    "and evaluate on every rank, not under `if self.is_main`"
                )
            raise
