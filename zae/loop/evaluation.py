"""Evaluate without a change to training: to its mode, its weights, and every random stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zae.common import random_state
from zae.common.null_context import NULL_CONTEXT
from zae.common.walk import leading_dimension
from zae.data.loader_state import preserve_streams
from zae.data.loaders import check_ended, check_loader, describe, has_pinned_batches
from zae.data.sharding import shares_of
from zae.data.workers import abandon_workers
from zae.errors import LoaderError, StepError
from zae.loop.epoch_log import in_turn, to_host
from zae.loop.history import Metrics
from zae.loop.progress import EvaluationAborted
from zae.loop.step_output import read_output
from zae.metrics.reductions import combine_loaders

if TYPE_CHECKING:
    from zae.optim.optimization import Optimization
    from zae.trainer import Trainer

__all__ = ["Evaluation", "evaluation_weights", "switch_mode"]

_SECONDS = 2.0  # Between two times that the ranks ask each other in a validation.
_TOGETHER = 8  # Batches of each rank whose predictions are gathered at once.


class DistributedStopFlag:
    """Whether a signal has come to any rank, agreed on by all while each evaluates its share of a validation.

    The ranks ask each other before the first batch, and then about every two seconds: before batches whose numbers
    follow from times that all of them know, and that every rank has. A rank with more batches waits for no other.
    """

    def __init__(self, trainer: Trainer, signals: Sequence[int], batches: int) -> None:
        self._trainer, self._own = trainer, signals
        found = trainer.gather((list(signals), batches))
        self.signals = [number for numbers, _ in found for number in numbers]
        self._least = min(count for _, count in found)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
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


def _modules_in_training(root: nn.Module) -> list[nn.Module]:
    """List the modules that are in training mode."""
    return [module for module in root.modules() if module.training]


def switch_mode(
    root: nn.Module, inner: nn.Module, modes: tuple[str, str], modules: list[nn.Module] | None
) -> list[nn.Module] | None:
    """Switch a model, and what ``root`` wraps around it, from a mode to another one.

    ``modules`` are those to put back into training mode, or None for all; the modules for the next switch are returned.
    """
    if modes == ("train", "test"):
        modules = _modules_in_training(inner)  # Not of the root: a wrapper may be another one by then.
    if modes[1] == "test":
        root.eval()
        return modules
    if modules is not None:
        inside = set(inner.modules())
        for module in (*modules, *(each for each in root.modules() if each not in inside)):
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


class Evaluation:
    """An evaluation of a trainer: no gradient, every module in evaluation mode, no draw from training's streams."""

    def __init__(self, trainer: Trainer, signals: Sequence[int] | None = None) -> None:
        self.trainer, self.signals = trainer, signals

    def metrics(self, loader: Any) -> dict[str, float]:
        """Return the metrics of one loader, or of each of several and of all together."""
        if not isinstance(loader, Mapping):
            check_loader(loader, takes_dict=True)
            return dict(self.epoch(loader))
        if not loader:
            raise LoaderError("loader is an empty dict; give loaders by name")
        for name, each in loader.items():
            check_loader(each, f"loader[{name!r}]")
        rows, kinds = dict[str, Metrics](), dict[str, str]()
        for place, (name, each) in enumerate(loader.items()):
            rows[name] = self.epoch(each, (place, len(loader)), str(name))
            now = {key: self.trainer.log_test.kinds.get(key, "mean") for key in self.trainer.log_test.means()}
            if differs := next((key for key, kind in now.items() if kinds.get(key, kind) != kind), None):
                raise StepError(
                    f"test_step returned {differs!r} to be combined by {now[differs]} with the loader {name!r}, and by "
                    f"{kinds[differs]} before; return it as the same type with each loader (zae.metrics)"
                )
            kinds |= now
        metrics = {f"{name}/{key}": value for name, row in rows.items() for key, value in row.items()}
        common = [key for key in next(iter(rows.values()), {}) if all(key in row for row in rows.values())]
        of_all = {key: combine_loaders(kinds.get(key, "mean"), [row[key] for row in rows.values()]) for key in common}
        return {**of_all, **metrics}

    def epoch(self, loader: Any, place: tuple[int, int] = (0, 1), name: str | None = None) -> Metrics:
        """Return the metrics of a loader, which of how many it is; raise `EvaluationAborted` after a signal."""
        trainer, metrics = self.trainer, Metrics()
        with self._fresh_log(), self._testing(loader, place=place, name=name):
            wrapped = trainer.wrap_loader(loader, False)
            batches = trainer.evaluation_batches(wrapped)
            if self.signals is None or trainer.world_size == 1:
                count = self._test_batches(loader, batches, trainer.logging, self.signals, wrapped=wrapped)
            else:
                flag = DistributedStopFlag(trainer, self.signals, len(shares_of(wrapped) or ()))
                count = self._test_batches(loader, flag.watch(batches), trainer.logging, flag.signals, wrapped=wrapped)
                count = None if flag.signals else count
            if count is not None:
                further = trainer.metric_on_epoch_end
                trainer.current_run.say_not_numbers(trainer.log_test, "test_step")
                metrics = trainer.history.summarize("test", trainer.gather_data, trainer.dp_world_size, further)
        if count is None:  # Raised here, where every context has been left as after any evaluation.
            trainer.log_test.clear()
            abandon_workers(batches, wrapped)
            raise EvaluationAborted
        # A step may leave everything to metric_on_epoch_end; of several ranks, one may have had no batch.
        if not len(trainer.log_test) and not any(trainer.gather(count)):
            once = "; an iterator is exhausted after one evaluation: give a list, or a class with __iter__"
            raise LoaderError(
                f"the loader yielded 0 batches ({describe(loader)}), so there is nothing to evaluate"
                + (once if isinstance(loader, Iterator) else "")
            )
        return metrics

    def record_batch(self, batch: Any) -> None:
        """Evaluate and record one batch, in an evaluation or outside of one."""
        with NULL_CONTEXT if self.trainer.current_run.is_evaluating else self._testing(None):
            self._test_batches(None, iter([batch]), self.trainer.logging)

    def outputs(self, loader: Any, take: Callable[[int | None, Any], None]) -> None:
        """Call ``take`` with the samples of each batch and what ``predict_step`` returns for it, on the host.

        It is called on every rank, with the batches of all ranks in their order, soon after they were computed.
        """
        check_loader(loader)
        trainer, run, held = self.trainer, self.trainer.current_run, list[Any]()

        def hold(values: Any, weight: Any) -> None:
            held[-1] = (leading_dimension(run.batch), to_host(values))

        def pass_on(is_last: bool) -> bool:
            run.is_loading, parts = False, trainer.gather_data((is_last, held))
            for each in in_turn([part for _, part in parts]):
                if each is not None:  # A batch that was None.
                    take(*each)
            held.clear()
            run.is_loading = not is_last
            return all(ends for ends, _ in parts)

        def hold_each(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                held.append(None)
                yield batch
                # Before the next batch is asked for, in which ranks without one may take part in a forward.
                if len(held) == (1 if trainer.world_size == 1 else _TOGETHER):
                    pass_on(False)

        is_default = getattr(trainer.predict_step, "__qualname__", "") == "Trainer.predict_step"
        with self._testing(loader, "test_step" if is_default else "predict_step"):  # As errors name it.
            wrapped = trainer.wrap_loader(loader, False)
            batches = hold_each(trainer.evaluation_batches(wrapped))
            self._test_batches(loader, batches, hold, weighs=False, wrapped=wrapped)
            while not pass_on(True):
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
        trainer, run, count, given = self.trainer, self.trainer.current_run, 0, 0
        to_device, step, forward_context = trainer.to_device, getattr(trainer, run.test_step), trainer.forward_context
        sample_weight, mode = trainer.sample_weight, run.test_step.removesuffix("_step")
        with run.iterating(loader):
            for batch in batches:
                if signals:
                    return None
                given += 1
                if batch is None:
                    continue
                run.batch = batch
                batch = to_device(batch)
                with forward_context():
                    out = step(batch)
                values, weight = read_output(out, batch, sample_weight, type(trainer), mode)
                if not count and weighs:
                    run.say_uncounted(batch, values)
                take(values, weight)
                run.batch = None
                count += 1
            check_ended(wrapped, given)
        return count

    @contextmanager
    def _testing(
        self, loader: Any, step: str = "test_step", place: tuple[int, int] = (0, 1), name: str | None = None
    ) -> Iterator[None]:
        """Enclose an evaluation by this step, and put back what it changes."""
        trainer, position, run = self.trainer, self.trainer.loader_position, self.trainer.current_run
        root = trainer.model if isinstance(trainer.model, nn.Module) else trainer.unwrap()
        modes = {module: module.training for module in root.modules()}
        before = trainer.mode, position.pinned, run.is_evaluating, run.test_step, run.loader_place, run.valid_name
        try:
            # Whether batches are pinned is asked of this loader, not of the epoch's.
            trainer.mode, position.pinned, run.is_evaluating = "test", has_pinned_batches(loader), True
            run.test_step, run.loader_place, run.valid_name = step, place, name
            root.eval()
            isolated = random_state.isolated(*random_state.generators_of(loader))
            with torch.no_grad(), isolated, preserve_streams(loader), trainer.evaluation_context():
                yield
            if root.training and step == "test_step":
                run.warn_of_training_mode()
        finally:
            for module, is_training in modes.items():  # A step may have called model.train().
                module.training = is_training
            trainer.mode, position.pinned, run.is_evaluating, run.test_step, run.loader_place, run.valid_name = before

    @contextmanager
    def _fresh_log(self) -> Iterator[None]:
        """Clear the log of the evaluation, and free what is not a number when it ends, also by an exception."""
        self.trainer.log_test.clear()
        try:
            yield
        finally:
            self.trainer.log_test.free()
