"""Copy a trainer, and borrow its loader: the trainer and every random stream stay as they were."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zae import random_state
from zae.data.loader_state import preserve_streams
from zae.data.loaders import copy_with, describe
from zae.model.copying import deep_copy
from zae.optim.copies import copy_optimizer
from zae.optim.factories import as_dict

__all__ = ["CannotCopyError", "borrow", "copy_trainer"]

_SHARED = (ModuleType, DataLoader, Dataset, Sampler, logging.Logger)


class CannotCopyError(Exception):
    """A trainer cannot be copied, or a loader not be put back; the message says why."""


# ------------------------------------------------------------------------------------------------ the loader


@contextmanager
def borrow(loader: Any) -> Iterator[Any]:
    """Yield a loader with the same batches, loaded in this process, and restore the streams that it reads."""
    if isinstance(loader, (list, tuple)):
        yield _Copies(loader)
        return
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        raise CannotCopyError(f"a batch of {describe(loader)} cannot be taken and put back")
    twin = copy_with(loader, num_workers=0, persistent_workers=False, timeout=0, prefetch_factor=None)
    with random_state.isolated(*random_state.generators_of(loader)), preserve_streams(loader):
        yield twin


class _Copies:
    """The batches of a list, each copied when it is taken: a step may change it in place."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return map(copy.deepcopy, self.batches)


# ------------------------------------------------------------------------------------------------ the copies


def copy_trainer(trainer: Any, cls: Any = None) -> Any:
    """Return a copy of a trainer that can train, or raise `CannotCopyError`.

    The copy has its own model, task, optimizers, add-ons and progress. Datasets, loaders and loggers of the task are
    shared with the trainer.
    """
    if not trainer.engine.can_save_alone:
        raise CannotCopyError("its state lies in parts on several ranks")
    state = trainer.__getstate__()
    twin = object.__new__(cls or type(trainer))
    memo = {id(trainer): twin, **{id(shared): shared for shared in _shared_by_copies(state)}}
    try:
        for optimizer in as_dict(trainer.optimizer).values():
            if isinstance(optimizer, Optimizer):  # copy.deepcopy leaves out the attributes of a subclass.
                copy_optimizer(optimizer, memo)
        copies = deep_copy(state, memo)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CannotCopyError(f"the model or the task cannot be copied ({type(error).__name__}: {error})") from error
    twin.__setstate__(copies)
    return twin


def _shared_by_copies(state: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what a copy shares with the trainer: modules of Python, data and loggers, also in lists and dicts."""
    for value in state.values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        yield from (part for part in parts if isinstance(part, _SHARED))
