"""Evaluate without a change to training: to its mode, its weights, and every random stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zae import random_state
from zae.arguments import Seed, checked
from zae.compose.introspect import is_default
from zae.data.loader_checks import check_ended, check_loader
from zae.data.loader_state import preserve_streams
from zae.data.loaders import describe, has_pinned_batches
from zae.data.workers import abandon_workers
from zae.errors import LoaderError
from zae.loop.activity import EvaluationSettings
from zae.loop.epoch_log import interleave
from zae.loop.metric_rows import Metrics
from zae.loop.step_output import read_output
from zae.loop.step_remarks import report_not_numbers, report_unknown_samples
from zae.metrics.reductions import combine_loaders
from zae.null_context import NULL_CONTEXT
from zae.parts import gather_dp
from zae.values.host import to_host
from zae.values.walk import leading_dimension

if TYPE_CHECKING:
    from zae.optim.optimization import Optimization
    from zae.trainer import Trainer

__all__ = ["Evaluation", "EvaluationAborted", "evaluated_model", "evaluation_weights", "switch_mode"]

_POLL_INTERVAL_S = 2.0  # Between two times that the ranks ask each other in a validation.
_GATHERED_BATCHES = 8  # Batches of each rank whose predictions are gathered at once.


class EvaluationAborted(BaseException):
    """A validation was left between two batches because a signal asks for the end; caught by the run."""


class DistributedStopFlag:
    """Whether a signal has come to any rank, agreed on by all while each evaluates its share of a validation.

    The ranks ask each other before the first batch, and then about every two seconds: before batches whose numbers
    follow from times that all of them know, and that every rank has. A rank with more batches waits for no other.
    """

    def __init__(self, trainer: Trainer, signals: Sequence[int], batches: int) -> None:
        self._trainer = trainer
        self._own_signals = signals
        self.signals: list[int] = []
        counts = []
        for numbers, count in trainer.gather((list(signals), batches)):
            self.signals += numbers
            counts.append(count)
        self._least = min(counts)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank, and ask the other ranks for signals between two batches."""
        began = time.monotonic()
        ask_at = 1
        for index, batch in enumerate(batches):
            if index == ask_at and index < self._least:
                own_seconds = (time.monotonic() - began) / index
                counts = torch.tensor([len(self._own_signals), own_seconds], dtype=torch.float64)
                signals, seconds = self._trainer.reduce(counts).tolist()  # Sums: all ranks go on by the same numbers.
                if signals:
                    self.signals.append(0)  # Which signal came to another rank does not matter: it ends the validation.
                batches_until = _POLL_INTERVAL_S * self._trainer.world_size / max(seconds, 1e-9)
                # The mean of a few batches may be far off: at most twice as many come before the next time.
                ask_at += int(min(index, max(1.0, batches_until)))
            yield batch


class _RankOutputs:
    """What this rank has computed of its batches, until it is passed on with that of all ranks, in their order."""

    def __init__(self, trainer: Trainer, take: Callable[[int | None, Any], None]) -> None:
        self._engine = trainer.engine
        self._activity = trainer.current_run.activity
        self._take = take
        self._batches_at_once = 1 if trainer.world_size == 1 else _GATHERED_BATCHES
        self._entries: list[tuple[int | None, Any] | None] = []  # One for each batch; None for a batch that was None.

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank, and pass on what was made of a few of them."""
        for batch in batches:
            self._entries.append(None)
            yield batch
            # Before the next batch is asked for, in which ranks without one may take part in a forward.
            if len(self._entries) == self._batches_at_once:
                self.pass_on(False)

    def store(self, values: Any, weight: Any) -> None:
        """Store what the step returned for the batch that was yielded last."""
        self._entries[-1] = (leading_dimension(self._activity.batch), to_host(values))

    def pass_on(self, is_last: bool) -> bool:
        """Gather what all ranks hold, and take it; return whether every rank has passed on its last batch."""
        self._activity.is_loading = False  # An error in here is not one of the loader.
        parts = gather_dp(self._engine, (is_last, self._entries))
        for entry in interleave([part for _, part in parts]):
            if entry is not None:
                self._take(*entry)
        self._entries.clear()
        self._activity.is_loading = not is_last
        return all(ends for ends, _ in parts)


def switch_mode(
    root: nn.Module, inner: nn.Module, modes: tuple[str, str], modules: list[nn.Module] | None
) -> list[nn.Module] | None:
    """Switch a model, and what ``root`` wraps around it, from a mode to another one.

    ``modules`` are those to put back into training mode, or None for all; the modules for the next switch are returned.
    """
    if modes == ("train", "test"):
        # Not those of the root: a wrapper may be another one by then.
        modules = [module for module in inner.modules() if module.training]
    if modes[1] == "test":
        root.eval()
        return modules
    if modules is not None:
        inside = set(inner.modules())
        wrappers = [module for module in root.modules() if module not in inside]
        for module in (*modules, *wrappers):
            module.training = True
    elif not root.training:
        root.train()
    return None


@contextmanager
def evaluation_weights(optimization: Optimization, device: torch.device) -> Iterator[None]:
    """Enclose an evaluation, also one that a training step calls within its autocast.

    An autocast keeps the casts of the weights until it ends, also when other weights are copied into the model: the
    evaluation would use those of training, and training would go on with those of the evaluation. The cache is not
    cleared, since training would then cast its weights a second time, and round their gradients in another way.
    """
    kinds = [kind for kind in ("cpu", device.type) if torch.amp.is_autocast_available(kind)]
    is_in_autocast = any(torch.is_autocast_enabled(kind) for kind in kinds)
    uses_cache = torch.is_autocast_cache_enabled()
    try:
        if is_in_autocast:
            torch.set_autocast_cache_enabled(False)
        with optimization.evaluation_weights():
            yield
    finally:
        torch.set_autocast_cache_enabled(uses_cache)


@contextmanager
def evaluated_model(trainer: Trainer) -> Iterator[None]:
    """Let a block use the model as an evaluation does; within an evaluation, change nothing."""
    if trainer.current_run.activity.evaluation.is_running:  # To enter its context again would reset its metrics.
        yield
        return
    with trainer.ready(), torch.no_grad(), trainer.evaluation_context():
        mode = trainer.mode
        trainer.toggle("test")
        try:
            yield
        finally:
            trainer.toggle(mode)


class Evaluation:
    """An evaluation of a trainer: no gradient, every module in evaluation mode, no draw from training's streams.

    With a seed the streams begin at it, else where they stand.
    """

    @checked
    def __init__(self, trainer: Trainer, signals: Sequence[int] | None = None, seed: Seed | None = None) -> None:
        self.trainer = trainer
        self.signals = signals
        self.seed = seed

    def metrics(self, loader: Any) -> dict[str, float]:
        """Return the metrics of one loader, or of each of several and of all together."""
        if not isinstance(loader, Mapping):
            check_loader(loader, takes_dict=True)
            return dict(self.epoch(loader))
        if not loader:
            raise LoaderError("loader is an empty dict; give loaders by name")
        for name, part in loader.items():
            check_loader(part, f"loader[{name!r}]")
        rows: dict[str, Metrics] = {}
        kinds: dict[str, str] = {}
        for name, part in loader.items():
            rows[name] = self.epoch(part, str(name))
            kinds |= self.trainer.log_test.kinds
        first, *others = rows.values()
        metrics = {}
        for key in first:
            if all(key in row for row in others):
                metrics[key] = combine_loaders(kinds.get(key, "mean"), [row[key] for row in rows.values()])
        for name, row in rows.items():
            for key, value in row.items():
                metrics[f"{name}/{key}"] = value
        return metrics

    def epoch(self, loader: Any, name: str | None = None) -> Metrics:
        """Return the metrics of a loader; raise `EvaluationAborted` after a signal.

        ``name`` is that of the loader, where it has one.
        """
        trainer = self.trainer
        metrics = Metrics()
        with self._fresh_log(), self._test_scope(loader, name=name):
            wrapped = trainer.wrap_loader(loader, False)
            batches = trainer.evaluation_batches(wrapped)
            if self.signals is None or trainer.world_size == 1:
                count = self._test_batches(loader, batches, trainer.logging, self.signals, wrapped=wrapped)
            else:
                from zae.data.sharding import shards_of  # Which several ranks have loaded.

                flag = DistributedStopFlag(trainer, self.signals, len(shards_of(wrapped) or ()))
                count = self._test_batches(loader, flag.watch(batches), trainer.logging, flag.signals, wrapped=wrapped)
                if flag.signals:  # They may have come to another rank, after the last batch of this one.
                    count = None
            if count is not None:
                further = trainer.metric_on_epoch_end
                report_not_numbers(trainer.current_run, trainer.log_test, "test_step")
                metrics = trainer.history.summarize("test", trainer.engine, further)
        if count is None:  # Raised here, where every context has been left as after any evaluation.
            trainer.log_test.clear()
            abandon_workers(batches, wrapped)
            raise EvaluationAborted
        # A step may leave everything to metric_on_epoch_end; of several ranks, one may have had no batch.
        if not len(trainer.log_test) and not any(trainer.gather(count)):
            remedy = ""
            if isinstance(loader, Iterator):
                remedy = "; an iterator is exhausted after one evaluation: give a list, or a class with __iter__"
            raise LoaderError(
                f"the loader yielded 0 batches ({describe(loader)}), so there is nothing to evaluate{remedy}"
            )
        return metrics

    def record_batch(self, batch: Any) -> None:
        """Evaluate and record one batch, in an evaluation or outside of one."""
        context = NULL_CONTEXT if self.trainer.current_run.activity.evaluation.is_running else self._test_scope(None)
        with context:
            self._test_batches(None, iter([batch]), self.trainer.logging)

    def outputs(self, loader: Any, take: Callable[[int | None, Any], None]) -> None:
        """Call ``take`` with the samples of each batch and what ``predict_step`` returns for it, on the host.

        It is called on every rank, with the batches of all ranks in their order, soon after they were computed.
        """
        check_loader(loader)
        trainer = self.trainer
        outputs = _RankOutputs(trainer, take)
        step = "test_step" if is_default(trainer.predict_step) else "predict_step"  # As errors name it.
        with self._test_scope(loader, step):
            wrapped = trainer.wrap_loader(loader, False)
            batches = outputs.watch(trainer.evaluation_batches(wrapped))
            self._test_batches(loader, batches, outputs.store, weighs=False, wrapped=wrapped)
            # A rank with fewer batches than others takes part in gathering theirs.
            while not outputs.pass_on(True):
                continue

    def _test_batches(
        self,
        loader: Any,
        batches: Iterator[Any],
        take: Callable[[Mapping[str, Any], Any], None],
        signals: Sequence[int] | None = None,
        weighs: bool = True,
        wrapped: Any = None,
    ) -> int | None:
        """Test each batch, and call ``take`` with values and weight; return how many, or None if a signal ended it.

        ``weighs`` says whether the weights matter, as they do in means; ``wrapped`` is the loader after
        ``wrap_loader``.
        """
        trainer = self.trainer
        run = trainer.current_run
        activity = run.activity
        step = getattr(trainer, activity.evaluation.step)
        mode = activity.evaluation.step.removesuffix("_step")
        # Looked up once: a small model is evaluated faster than attributes of a composed class are found.
        to_device = trainer.to_device
        forward_context = trainer.forward_context
        sample_weight = trainer.sample_weight
        samples = 0
        count = 0
        with activity.reading(loader):
            for batch in batches:
                if signals:
                    return None
                samples += 1
                if batch is None:
                    continue
                activity.batch = batch
                batch = to_device(batch)
                with forward_context():
                    out = step(batch)
                values, weight = read_output(out, batch, sample_weight, type(trainer), mode)
                if not count and weighs:
                    report_unknown_samples(run, batch, values)
                take(values, weight)
                activity.batch = None
                count += 1
            check_ended(wrapped, samples)
        return count

    @contextmanager
    def _test_scope(self, loader: Any, step: str = "test_step", name: str | None = None) -> Iterator[None]:
        """Enclose an evaluation by this step, and put back what it changes."""
        trainer = self.trainer
        position = trainer.loader_position
        root = trainer.model if isinstance(trainer.model, nn.Module) else trainer.unwrap()
        modes = {module: module.training for module in root.modules()}
        before_trainer = (trainer.mode, position.pinned)
        activity = trainer.current_run.activity
        evaluation_before = activity.evaluation
        try:
            trainer.mode = "test"
            position.pinned = has_pinned_batches(loader)  # Of this loader, not of the epoch's.
            activity.evaluation = EvaluationSettings(True, step, name, self.seed)
            root.eval()
            isolated = random_state.isolated(*random_state.generators_of(loader))
            with torch.no_grad(), isolated, preserve_streams(loader), trainer.evaluation_context():
                if self.seed is not None:
                    random_state.seed_everything(self.seed)
                    random_state.draw_as_rank(trainer.engine.dp_rank)
                yield
        finally:
            for module, is_training in modes.items():  # A step may have called model.train().
                module.training = is_training
            trainer.mode, position.pinned = before_trainer
            activity.evaluation = evaluation_before

    @contextmanager
    def _fresh_log(self) -> Iterator[None]:
        """Clear the log of the evaluation, and free what is not a number when it ends, also by an exception."""
        self.trainer.log_test.clear()
        try:
            yield
        finally:
            self.trainer.log_test.free()
