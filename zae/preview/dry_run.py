"""Try a step on copies: a batch with a copy of the model, an optimizer on parameters without data.

The trainer, its loaders and every random stream stay as they were.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zae.common import argument_checks, optim, random_state
from zae.common.device import to_device
from zae.common.optimizer_modes import has_modes
from zae.common.optimizer_state import copy_optimizer
from zae.common.walk import tensors_in
from zae.composition.introspect import set_by, slots_of
from zae.composition.leave_out import leave_out
from zae.data.loader_state import preserve_streams
from zae.data.loaders import BatchLimits, copy_with, describe
from zae.loop.epoch_log import plain
from zae.loop.step_output import read_output

__all__ = [
    "NotTried", "Tried", "begin_call", "borrow", "copy_to_train", "copy_trainer", "first_batch", "first_batches",
    "state_after_a_step", "try_step",
]  # fmt: skip

_MANY = 10_000  # Entries of a container that is put back.
_LARGE = 256 << 20  # Bytes of tensors in the user's own attributes: more is not copied.
_DEPTH = 4
_LEFT_OUT = ("parallel", "state", "observe")  # The layers of add-ons that start processes, save and log.


class NotTried(Exception):
    """A step cannot be tried without a side effect, or at all; the message says why."""


class Tried(NamedTuple):
    """The outcome of a step that was tried with one batch."""

    names: list[str]  # Of the metrics.
    fault: Exception | None = None  # What ``metric_on_epoch_end`` raised of it.


def try_step(trainer: Any, loader: Any, split: str, name: str | None = None) -> Tried:
    """Try a step with one batch and a copy of the trainer, and return what would be recorded.

    `NotTried` is raised where a batch cannot be taken and put back, or something cannot be copied.
    """
    if isinstance(loader, Mapping):
        each_tried = {name: try_step(trainer, each, split, str(name)) for name, each in loader.items()}
        lists = {name: tried.names for name, tried in each_tried.items()}
        common = [key for key in next(iter(lists.values()), []) if all(key in names for names in lists.values())]
        faults = [tried.fault for tried in each_tried.values() if tried.fault is not None]
        return Tried(common + [f"{name}/{key}" for name, names in lists.items() for key in names], *faults[:1])
    batch, is_train = first_batch(loader), split == "train"
    with random_state.isolated():
        twin = copy_trainer(trainer, leave_out(type(trainer), ("state", "observe")), is_whole=False)
        twin.mode, twin.valid_name = "train" if is_train else "test", name
        twin.model.train(is_train)
        with torch.set_grad_enabled(is_train):
            return _make_step(twin, to_device(batch, twin.device))


def _make_step(twin: Any, batch: Any) -> Tried:
    """Make and record one step of a copy."""
    is_train = twin.mode == "train"
    log, step = (twin.log_train, twin.train_step) if is_train else (twin.log_test, twin.test_step)
    try:
        with twin.forward_context():
            out = step(batch)
        output = read_output(out, batch, twin.sample_weight, type(twin), twin.mode)
    except Exception as error:
        error.add_note(f"zae: the batch was {argument_checks.describe_batch(batch)}")
        raise
    log.record(*output)
    names, twin.current_run.tried = list(log.means()), output[0]
    try:
        own = twin.history.further_metrics(twin.mode, twin.metric_on_epoch_end)
    except Exception as fault:
        if getattr(fault, "is_certain", False):  # More batches do not change it.
            raise
        return Tried(names, fault)
    return Tried([*names, *(name for name in own if name not in names)])


# ------------------------------------------------------------------------------------------------ the batch


def first_batch(loader: Any) -> Any:
    """Take a batch, with the loader, its parts and every random stream as they were; else raise `NotTried`."""
    return first_batches(loader, 1)[0]


def first_batches(loader: Any, count: int) -> list[Any]:
    """Take at most so many batches, as `first_batch` does."""
    with borrow(loader) as twin:
        try:
            batches = [*islice((batch for batch in twin if batch is not None), count)]
        except Exception as error:
            if getattr(loader, "num_workers", 0):  # It may need what a worker prepares.
                raise NotTried(f"a batch could not be loaded without workers ({error})") from error
            raise
    if not batches:
        raise NotTried(f"{describe(loader)} has no batch")
    return batches


@contextmanager
def borrow(loader: Any) -> Iterator[Any]:
    """Yield a loader with the same batches, loaded in this process, and put back what it reads; or raise `NotTried`."""
    if isinstance(loader, (list, tuple)):
        yield _Copies(loader)
        return
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        raise NotTried(f"a batch of {describe(loader)} cannot be tried and put back")
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


def copy_trainer(trainer: Any, cls: Any = None, is_whole: bool = True) -> Any:
    """Return a copy of a trainer with its own model, task and progress; raise `NotTried` if it cannot be copied.

    A whole copy has its own optimizers and add-ons, and can train. Else these are shared, and the copy, with an
    empty history, is for a forward and a backward. Datasets, loaders and loggers of the task are always shared.
    """
    module = trainer.unwrap()
    if any(trainer.layout(each) != "replicated" for each in module.parameters()):
        raise NotTried("its parameters lie in parts on several ranks")
    if not is_whole and optim.has_lazy([*module.parameters(), *module.buffers()]):
        raise NotTried("the model is lazy: its first batch makes its weights")
    state = trainer.__getstate__() if is_whole else {n: v for n, v in vars(trainer).items() if n != "current_run"}
    own = {name: value for name, value in state.items() if name not in _names_of_zae(type(trainer))}
    twin = object.__new__(cls or type(trainer))
    memo = {id(trainer): twin, **_shared_by_copies(own, module, is_whole)}
    # Without its wrappers: a compiled model would be compiled again.
    parts = {**own, "_module": module, "model": module, "progress_checker": trainer.progress_checker}
    try:
        for optimizer in optim.as_dict(trainer.optimizer).values() if is_whole else ():
            if isinstance(optimizer, Optimizer):  # copy.deepcopy leaves out the attributes of a subclass.
                copy_optimizer(optimizer, memo)
        copies = copy.deepcopy(state if is_whole else parts, memo)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise NotTried(f"the model or the task cannot be copied ({type(error).__name__}: {error})") from error
    if is_whole:
        twin.__setstate__(copies)
        return twin
    shared = {name: copy.copy(value) if type(value) in (list, dict, set) else value for name, value in state.items()}
    vars(twin).update({**shared, **copies}, current_run=type(trainer.current_run)(twin), log=_check_only)
    twin.optimization, twin.history = copy.copy(trainer.optimization), trainer.history.fork()
    twin.device = next((each.device for each in twin.model.parameters()), trainer.device)
    return twin


def copy_to_train(trainer: Any) -> Any:
    """Return a whole copy that trains in this process, and neither saves nor logs."""
    twin = copy_trainer(trainer, leave_out(type(trainer), _LEFT_OUT))
    twin.log_bar = twin.try_validation = False
    twin.loader_position = trainer.loader_position.fresh()  # It is given lists.
    if "parallel" in slots_of(type(trainer)):  # Its processes are still to be started.
        twin.device = next((each.device for each in twin.unwrap().parameters()), trainer.device)
    return twin


def begin_call(twin: Any, loader: Any, valid_loader: Any, limits: Any) -> Any:
    """Begin a call of run with a copy, whose loaders are not limited again."""
    limits = copy.copy(limits)
    limits.batches = BatchLimits()
    call = twin.current_run = twin.current_run.new_call(loader, valid_loader, limits)
    return call


def _check_only(metrics: Any, step: int) -> None:
    """Replace ``log`` in a copy: check the metrics, and record nothing."""
    plain(metrics)


@functools.cache
def _names_of(cls: type) -> frozenset[str]:
    return frozenset(set_by(cls, only_self=True))


def _names_of_zae(cls: type) -> frozenset[str]:
    """Return the attributes that the classes of zae set; all others belong to the task."""
    return frozenset().union(*(_names_of(c) for c in cls.__mro__ if c.__module__.partition(".")[0] == "zae"))


def _shared_by_copies(own: Mapping[str, Any], module: nn.Module, is_whole: bool) -> dict[int, Any]:
    """Return, by id, the objects among the attributes of the task that a copy shares; refuse many tensors in others."""
    kinds = (ModuleType, DataLoader, Dataset, Sampler, logging.Logger) + (() if is_whole else (Optimizer, LRScheduler))
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
        raise NotTried(f"the attributes of the task hold {total} bytes of tensors")
    return shared


# ------------------------------------------------------------------------------------------ an optimizer's state


def state_after_a_step(optimizer: Optimizer) -> Any:
    """Return the state of an optimizer after a step; before its first one, of tensors without data."""
    return optimizer.state or _state_of_a_step(optimizer)


def _state_of_a_step(optimizer: Optimizer) -> Any:
    """Return the state of an optimizer after its first step, tried on tensors without data."""
    # What else it holds is copied, large tensors without their data: a step may change it in place.
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in tensors_in(vars(optimizer))
                            if each.dim()}  # fmt: skip
    for parameter in optim.parameters_of(optimizer):
        memo[id(parameter)] = shape = torch.zeros_like(parameter, device="meta").requires_grad_()
        shape.grad = torch.zeros_like(shape)
    try:
        twin = copy_optimizer(optimizer, memo, state=defaultdict(dict))
        for group in twin.param_groups:
            group.update(foreach=False, fused=False)
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_modes(optimizer):
                twin.train()  # type: ignore[attr-defined]
            type(optimizer).step(twin)
    except Exception:
        return [p for group in optimizer.param_groups for p in group["params"]] * 2  # As much as Adam keeps.
    return twin.state


def in_words(error: Exception) -> str:
    """Return the class, the message and the notes of an exception, in one paragraph."""
    notes = " ".join(note.removeprefix("zae: ") for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
