"""Copy a trainer, and borrow its loader: the trainer, its loaders and every random stream stay as they were."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zae.common import optim, random_state
from zae.common.copying import deep_copy
from zae.common.optimizer_state import copy_optimizer
from zae.composition.introspect import set_by
from zae.data.loader_state import preserve_streams
from zae.data.loaders import copy_with, describe

__all__ = ["CannotCopyError", "borrow", "copy_trainer"]

_MANY = 10_000  # Entries of a container that is put back.
_LARGE = 256 << 20  # Bytes of tensors in the user's own attributes: more is not copied.
_DEPTH = 4


class CannotCopyError(Exception):
    """A trainer cannot be copied, or a loader not be put back; the message says why."""


# ------------------------------------------------------------------------------------------------ the loader


@contextmanager
def borrow(loader: Any) -> Iterator[Any]:
    """Yield a loader with the same batches, loaded in this process, and put back what it reads; or refuse."""
    if isinstance(loader, (list, tuple)):
        yield _Copies(loader)
        return
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        raise CannotCopyError(f"a batch of {describe(loader)} cannot be taken and put back")
    twin = copy_with(loader, num_workers=0, persistent_workers=False, timeout=0, prefetch_factor=None)
    with random_state.isolated(*random_state.generators_of(loader)), preserve_streams(loader), _put_back(loader):
        yield twin


class _Copies:
    """The batches of a list, each copied when it is taken: a step may change it in place."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return map(copy.deepcopy, self.batches)


@contextmanager
def _put_back(loader: Any) -> Iterator[None]:
    """Put back the attributes of the dataset, samplers and collate function: counters, and files that were opened."""
    parts: dict[int, Any] = {}
    waiting = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (list, tuple)) and len(part) < _MANY:
            waiting += [each for each in part if isinstance(each, (Dataset, Sampler))]
        elif id(part) not in parts and not isinstance(part, type) and hasattr(part, "__dict__"):
            parts[id(part)] = part
            waiting += [getattr(part, name, None) for name in ("dataset", "datasets", "sampler", "data_source")]
    kept = [(part, dict(vars(part)), _entries(part)) for part in parts.values()]
    try:
        yield
    finally:
        for part, attributes, containers in kept:
            vars(part).clear()
            vars(part).update(attributes)
            for container, entries in containers:
                _fill(container, entries)


def _entries(part: Any) -> list[tuple[Any, Any]]:
    """List the containers among the attributes of an object, each with a copy of its entries."""
    held = [value for value in vars(part).values() if type(value) in (list, dict, set) and len(value) < _MANY]
    return [(value, copy.copy(value)) for value in held]


def _fill(container: Any, entries: Any) -> None:
    """Restore the entries of a container."""
    if len(container) != len(entries) or type(container) is not list:
        container.clear()
        container.extend(entries) if type(container) is list else container.update(entries)


# ------------------------------------------------------------------------------------------------ the copies


def copy_trainer(trainer: Any, cls: Any = None) -> Any:
    """Return a copy of a trainer that can train, or raise `CannotCopyError`.

    The copy has its own model, task, optimizers, add-ons and progress. Datasets, loaders and loggers of the task are
    shared with the trainer.
    """
    module = trainer.unwrap()
    if any(trainer.layout(each) != "replicated" for each in module.parameters()):
        raise CannotCopyError("its parameters lie in parts on several ranks")
    state = trainer.__getstate__()
    own = {name: value for name, value in state.items() if name not in _names_of_zae(type(trainer))}
    twin = object.__new__(cls or type(trainer))
    memo = {id(trainer): twin, **_shared_by_copies(own, module)}
    try:
        for optimizer in optim.as_dict(trainer.optimizer).values():
            if isinstance(optimizer, Optimizer):  # copy.deepcopy leaves out the attributes of a subclass.
                copy_optimizer(optimizer, memo)
        copies = deep_copy(state, memo)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CannotCopyError(f"the model or the task cannot be copied ({type(error).__name__}: {error})") from error
    twin.__setstate__(copies)
    return twin


@functools.cache
def _names_of(cls: type) -> frozenset[str]:
    return frozenset(set_by(cls, only_self=True))


def _names_of_zae(cls: type) -> frozenset[str]:
    """Return the attributes that the classes of zae set; all others belong to the task."""
    return frozenset().union(*(_names_of(c) for c in cls.__mro__ if c.__module__.partition(".")[0] == "zae"))


def _shared_by_copies(own: Mapping[str, Any], module: nn.Module) -> dict[int, Any]:
    """Return, by id, the objects among the attributes of the task that a copy shares; refuse many tensors in others."""
    kinds = (ModuleType, DataLoader, Dataset, Sampler, logging.Logger)
    shared, total = dict[int, Any](), 0
    seen, waiting = set(map(id, module.modules())), [(value, _DEPTH) for value in own.values()]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            shared[id(value)] = value
        elif isinstance(value, (Tensor, np.ndarray)):
            total += 0 if isinstance(value, Tensor) and optim.has_lazy([value]) else value.nbytes
        elif isinstance(value, nn.Module):
            waiting += [(each, 0) for each in (*value.parameters(), *value.buffers())]
        elif depth and isinstance(value, (list, tuple, set, dict)):
            waiting += [(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value)]
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            waiting += [(each, depth - 1) for each in vars(value).values()]
    if total > _LARGE:
        raise CannotCopyError(f"the attributes of the task hold {total} bytes of tensors")
    return shared
