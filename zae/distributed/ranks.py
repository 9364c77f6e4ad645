"""RanksEngine: the engine of several processes that have joined, without a word on how they divide a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zae.distributed import shards
from zae.distributed.collectives import all_reduce, average, broadcast, gather_objects
from zae.distributed.drift import CollectiveCalls, in_time
from zae.distributed.launcher import launched_world
from zae.distributed.mesh import DIMENSIONS, Mesh
from zae.distributed.rank_process import has_lost_peer, has_timed_out
from zae.errors import DistributedError
from zae.parts import SingleProcess
from zae.values.walk import is_sharded, map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["NotJoined", "RanksEngine"]


class NotJoined(SingleProcess):
    """The engine of a process before it joins the others: under a launcher it knows its number, and works alone.

    A copy looks for a launcher again: it may be one for a process that was started.

    Parameters
    ----------
    sizes : mapping of str to int
        How many ranks divide the work along each dimension, as the option ``mesh`` says it.
    dimensions : sequence of str
        The dimensions along which they may.
    """

    def __init__(self, sizes: Mapping[str, int], dimensions: Sequence[str]) -> None:
        super().__init__()
        self._arguments = sizes, dimensions
        self.rank, self.world_size = launched_world() or (0, 1)
        mesh = Mesh(sizes, dimensions, self.world_size)
        self.dp_rank = mesh.dp_rank(self.rank)
        self.dp_world_size = mesh.dp_world_size

    def __reduce__(self) -> Any:
        return NotJoined, self._arguments


class RanksEngine(SingleProcess):
    """The engine of the processes of a process group, which hold a tensor whole or in parts (DTensor).

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
        self.rank = dist.get_rank()
        self.world_size = mesh.world
        self.dp_rank = mesh.dp_rank(self.rank)
        self.dp_world_size = mesh.dp_world_size
        self._background: dist.ProcessGroup | None = None  # That of `gather` in the background.
        self._device_mesh: DeviceMesh | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which makes process groups of its own."""
        return {**vars(self), "_background": None, "_device_mesh": None}

    def device_mesh(self, device: torch.device, dimensions: Sequence[str] = DIMENSIONS) -> DeviceMesh:
        """Return the mesh for torch along these dimensions, on this kind of device.

        All ranks call it, since the first call makes groups.
        """
        if self._device_mesh is None:
            self._device_mesh = self.mesh.build(device, self.timeout)
        names = tuple(name for name in self.mesh.sizes if name in dimensions)
        return self._device_mesh if len(names) == len(self.mesh.sizes) else self._device_mesh[names]

    def reduce(self, value: Tensor) -> Tensor:
        # All ranks add up a copy of the tensor, which they get in its place.
        total = value.clone()
        with self._explaining_silence():
            all_reduce(total)
        return total

    def gather(self, value: Any, *, in_background: bool = False) -> list[Any]:
        # Each rank sends its value to all others, as bytes of pickle.
        if in_background:
            return self._gather_in_background(value)
        with self._explaining_silence():
            return gather_objects(value)

    def _gather_in_background(self, value: Any) -> list[Any]:
        """Gather in a process group of its own; all ranks make the first call, which opens it, at one place."""
        try:
            if self._background is None:
                waiting = timedelta(seconds=self.timeout)
                self._background = in_time(lambda: dist.new_group(backend="gloo", timeout=waiting), self.timeout)
            return gather_objects(value, self._background)
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} of {self.world_size}: another rank has ended, or did not answer within the "
                f"timeout of {self.timeout:g} s, while a checkpoint was written; resume from the one before"
            ) from error

    def rendezvous(self, call: str) -> None:
        # The ranks compare the name of the call over the store of the group, before they exchange any tensor for it.
        CollectiveCalls.rendezvous(call, self.timeout)

    def full_tensors(self, value: Any, keeps: bool = True) -> Any:
        gathered: dict[Tensor, Tensor] = {}  # A tensor with several names is gathered once.

        def gather(tensor: Tensor) -> Tensor:
            if not is_sharded(tensor):
                return tensor
            if tensor not in gathered:
                gathered[tensor] = self._gather_parts(tensor).to("cpu" if keeps else "meta")
            return gathered[tensor]

        return map_tensors(gather, value)

    def _gather_parts(self, tensor: Tensor) -> Tensor:
        """Return a tensor whole: each rank sends its part to all others of the mesh of the tensor."""
        try:
            whole: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
            return whole
        except RuntimeError as error:
            if not has_lost_peer(error):
                error.add_note(
                    f"zae: rank {self.rank} of {self.world_size} was gathering a tensor of shape {tuple(tensor.shape)} "
                    "from the parts that all ranks hold; checkpoints in shards gather nothing: save_format='sharded'"
                )
                raise
            raise DistributedError(
                f"rank {self.rank} of {self.world_size} gathers a tensor that is sharded over all ranks, but the other "
                "ranks did not take part. Call state_dict, save_model and evaluate on every rank, not under "
                "`if self.is_main`; only rank 0 writes the file"
            ) from error

    def begin(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        # Rank 0 sends what is whole on each rank. A part of a tensor was sent as the tensor was divided.
        tensors = [*module.parameters(), *parameters, *module.buffers()]
        distinct = {id(tensor): tensor for tensor in tensors if tensor.numel() and not is_sharded(tensor)}
        broadcast(distinct.values())

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.dp_world_size == 1:  # All ranks have the same batches, and the same gradients.
            return
        # The ranks tell each other which gradients they have, and then add them up, as one flat tensor of each type.
        # Gradients of parts were averaged by the backward.
        average([parameter for parameter in parameters if not is_sharded(parameter)], self.world_size, self.reduce)

    def sync_buffers(self, module: nn.Module) -> None:
        if self.dp_world_size > 1:  # Rank 0 sends its own.
            broadcast(buffer for buffer in module.buffers() if buffer.numel())

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not any(map(is_sharded, gradients)):
            return super().gradient_norm(parameters)
        # Each rank squares its parts; the squares are added up over the dimensions of the mesh that divide a gradient.
        return shards.gradient_norm(gradients)

    @contextmanager
    def _explaining_silence(self) -> Iterator[None]:
        """Add to the error of a timeout what some ranks may have called alone."""
        try:
            yield
        except RuntimeError as error:
            if has_timed_out(error):
                error.add_note(
                    f"zae: rank {self.rank} of {self.world_size} waited for the others. Call state_dict, save_model "
                    "and evaluate on every rank, not under `if self.is_main`"
                )
            raise
