"""Evaluation that leaves training exactly as it is: its mode, its weights, and every random stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zae.common import random_state
from zae.common.optimizer_modes import NOTHING
from zae.data.gather import batches_of
from zae.data.loader_state import undrawn
from zae.data.loaders import check_loader, describe, gives_pinned
from zae.data.sharding import shares_of
from zae.data.workers import part_from_workers
from zae.errors import LoaderError
from zae.loop import binding
from zae.loop.epoch_log import in_turn, to_host
from zae.loop.history import Metrics
from zae.loop.step_output import call_step

if TYPE_CHECKING:
    from zae.trainer import Trainer

_SECONDS = 2.0  # Between two times that the ranks ask each other in a validation.


class EvaluationAborted(BaseException):
    """A validation was left between two batches because a signal asks for the end; caught by the run."""


class DistributedStopFlag:
    """Whether a signal has come to any rank, agreed on by all while each walks its share of a validation.

    The ranks ask each other before the first batch, and then about every two seconds: before batches whose numbers
    follow from times that all of them know, and that every rank has. A rank with more batches waits for no other.

    Parameters
    ----------
    trainer : Trainer
        One of the ranks.
    signals : sequence of int
        Those that have come to this rank, at any moment.
    batches : int
        The number of batches of this rank; 0 where it is unknown.

    Attributes
    ----------
    signals : list of int
        Empty until the ranks have agreed on the end.
    """

    def __init__(self, trainer: Trainer, signals: Sequence[int], batches: int) -> None:
        self._trainer, self._own = trainer, signals
        found = trainer.gather((list(signals), batches))
        self.signals = [number for numbers, _ in found for number in numbers]
        self._least = min(count for _, count in found)

    def walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank, and ask the others between them."""
        ask_at, began = 1, time.monotonic()
        for index, batch in enumerate(batches):
            if index == ask_at and index < self._least:
                own = torch.tensor([len(self._own), (time.monotonic() - began) / index], dtype=torch.float64)
                signals, seconds = self._trainer.reduce(own).tolist()
                self.signals += [0] * bool(signals)
                # The mean of a few batches may be far off: at most twice as many come before the next time.
                ask_at += int(min(index, max(1.0, _SECONDS * self._trainer.world_size / max(seconds, 1e-9))))
            yield batch


def switch(trainer: Trainer, mode: str) -> None:
    """Set the mode of a trainer and of its modules; one that was frozen with ``.eval()`` before stays frozen."""
    root, before, trainer.mode = _root_of(trainer), trainer.mode, mode
    if mode == "test" and before == "train":
        trainer._in_training = _in_training(trainer._module)  # Not of a wrapper, which may be another one by then.
    if mode == "test":
        root.eval()
    elif trainer._in_training is not None:
        inner = {id(module) for module in trainer._module.modules()}
        for module in (*trainer._in_training, *(each for each in root.modules() if id(each) not in inner)):
            module.training = True
        trainer._in_training = None
    elif not root.training:
        root.train()
    if trainer.current_run.is_ready:
        binding.bind(trainer)


def _root_of(trainer: Trainer) -> nn.Module:
    """Return the model as it is wrapped, or the one that was given where the wrapper is not a module."""
    return trainer.model if isinstance(trainer.model, nn.Module) else trainer._module


def _in_training(root: nn.Module) -> list[nn.Module]:
    """List the modules that are in training mode."""
    return [module for module in root.modules() if module.training]


@contextmanager
def testing(trainer: Trainer, loader: Any) -> Iterator[None]:
    """Evaluate: no gradient, every module in evaluation mode, and no number drawn from training's streams."""
    mode, root = trainer.mode, _root_of(trainer)
    training = _in_training(root)
    position = trainer.loader_position
    pinned, is_within = position.pinned, position.is_evaluating
    try:
        trainer.mode, position.pinned = "test", gives_pinned(loader)  # Of this loader, not the epoch's.
        position.is_evaluating = True
        binding.bind(trainer)
        root.eval()
        drawn = random_state.isolated(*random_state.generators_of(loader))
        with torch.no_grad(), drawn, undrawn(loader), trainer.evaluation_context():
            yield
    finally:
        for module in training:
            module.training = True
        trainer.mode, position.pinned, position.is_evaluating = mode, pinned, is_within
        binding.bind(trainer)


@contextmanager
def _fresh_log(trainer: Trainer) -> Iterator[None]:
    """Begin the log of an evaluation, and free what is not a number when that ends, by an exception too."""
    trainer.log_test.clear()
    try:
        yield
    finally:
        trainer.log_test.free()


def test_epoch(trainer: Trainer, loader: Any, signals: Sequence[int] | None) -> Metrics:
    """Evaluate one loader, or give it up between two batches, where signals that ask for the end are looked at."""
    with _fresh_log(trainer), testing(trainer, loader):
        own = trainer.wrap_loader(loader, False)
        batches = batches_of(own, trainer.fast_data)
        if signals is None or trainer.world_size == 1:
            count = _record_all(trainer, loader, batches, signals)
        else:
            agreed = DistributedStopFlag(trainer, signals, len(shares_of(own) or ()))
            count = _record_all(trainer, loader, agreed.walk(batches), agreed.signals)
            count = None if agreed.signals else count
        if count is not None:
            further = trainer.metric_on_epoch_end
            metrics = trainer.history.summarize("test", trainer.gather, trainer.world_size, further)
    if count is None:  # Raised here, where every context has been left as after any evaluation.
        trainer.log_test.clear()
        part_from_workers(batches, own)
        raise EvaluationAborted
    # A step may leave everything to metric_on_epoch_end; of several ranks, one may have had no batch.
    if not len(trainer.log_test) and not any(trainer.gather(count)):
        once = "; an iterator is exhausted after one evaluation: give a list, or a class with __iter__"
        raise LoaderError(
            f"the loader yielded 0 batches ({describe(loader)}), so there is nothing to evaluate"
            + (once if isinstance(loader, Iterator) else "")
        )
    return metrics


def _record_all(
    trainer: Trainer, loader: Any, batches: Iterator[Any], signals: Sequence[int] | None = None
) -> int | None:
    """Test and record each batch; return how many there were, or None where a signal ended it early."""
    to_device, test_step, logging = trainer.to_device, trainer.test_step, trainer.logging
    run, count = trainer.current_run, 0
    with run.evaluating(loader):
        for batch in batches:
            if signals:
                return None
            if batch is None:
                continue
            run.batch = batch
            logging(*call_step(trainer, test_step, to_device(batch)))
            run.batch = None
            count += 1
    return count


def test_batch(trainer: Trainer, batch: Any) -> None:
    """Evaluate and record one batch, in an evaluation or outside of one."""
    with NOTHING if trainer.loader_position.is_evaluating else testing(trainer, None):
        _record_all(trainer, None, iter([batch]))


def evaluate(trainer: Trainer, loader: Any, signals: Sequence[int] | None = None) -> dict[str, float]:
    """Evaluate one loader, or each of several and their mean."""
    if not isinstance(loader, Mapping):
        check_loader(loader)
        return dict(test_epoch(trainer, loader, signals))
    if not loader:
        raise LoaderError("loader is an empty dict; give loaders by name")
    for name, each in loader.items():
        check_loader(each, f"loader[{name!r}]")
    rows = {name: test_epoch(trainer, each, signals) for name, each in loader.items()}
    metrics = {f"{name}/{key}": value for name, row in rows.items() for key, value in row.items()}
    common = [key for key in next(iter(rows.values()), {}) if all(key in row for row in rows.values())]
    return {**{key: sum(row[key] for row in rows.values()) / len(rows) for key in common}, **metrics}


def outputs_of(trainer: Trainer, loader: Any) -> list[dict[str, Any]]:
    """List what ``test_step`` returns for each batch, on the host; those of all ranks in turn."""
    check_loader(loader)
    with trainer.ready(), testing(trainer, loader):
        run, outputs = trainer.current_run, []
        with run.evaluating(loader):
            for batch in batches_of(trainer.wrap_loader(loader, False), trainer.fast_data):
                if batch is None:
                    continue
                run.batch = batch
                outputs.append(to_host(call_step(trainer, trainer.test_step, trainer.to_device(batch))[0]))
                run.batch = None
        return in_turn(trainer.gather(outputs))
