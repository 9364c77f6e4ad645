"""The attention of torch over a divided sequence, in which keys and values are sent around."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from zae.errors import ConfigError

__all__ = ["check_ring", "ring"]


def check_ring(given: Any, devices: Sequence[torch.device]) -> None:
    """Refuse an unknown way to attend, and that of torch on a CPU."""
    if given not in ("gather", "ring"):
        raise ConfigError(f"context_attention={given!r}; it must be 'gather' or 'ring'")
    if given == "ring" and any(each.type == "cpu" for each in devices):
        raise ConfigError(
            "context_attention='ring' is the context_parallel of torch, which has no kernel of attention for CPUs; "
            "write context_attention='gather'"
        )


def ring(mesh: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what encloses the forwards and backwards of a model on the ranks of the dimension "context"."""
    own = mesh["context"] if len(mesh.mesh_dim_names) > 1 else mesh

    @contextmanager
    def enclose() -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        # It divides a tensor in any case, and takes its device from it.
        spare = torch.zeros(2 * own.size(), device=own.device_type)
        with context_parallel(own, buffers=[spare], buffer_seq_dims=[0], no_restore_buffers={spare}):
            yield

    return enclose
