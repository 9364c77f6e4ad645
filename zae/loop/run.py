"""What `Trainer.run` and `Trainer.run_epoch` do between the steps: plan, log, validate, judge and count."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from zae.common import argument_checks, optim, optimizer_modes, optimizer_settings
from zae.data.loading import check_loader, describe, length_of
from zae.errors import ConfigError, LoaderError, MonitorError
from zae.loop import binding, scheduling
from zae.loop.epoch_log import EpochLog, merge_sums
from zae.loop.history import Metrics
from zae.loop.progress import Every, warn_of_early_end
from zae.loop.stop_signals import GivenUp
from zae.schedulers import is_plateau

if TYPE_CHECKING:
    from zae.trainer import Trainer

_log = logging.getLogger("zae")
_SHOWN = 5  # Names of parameters in a warning.


def bounds(trainer: Trainer, plan: Plan) -> tuple[int, int]:
    """Return the epoch and the step at which this call of ``run`` ends at the latest; ``sys.maxsize`` is no limit."""
    progress, starts, call = trainer.progress_checker, trainer.progress_checker.run_starts, trainer._calls
    if call + 1 < len(starts):
        epoch, step = starts[call + 1]  # It is over, as the state has it, and may have ended early.
        return epoch, step
    epoch, step = starts[call] if call < len(starts) else (progress.epoch, progress.step)
    last_epoch = sys.maxsize if plan.n_epoch is None else epoch + plan.n_epoch
    return last_epoch, sys.maxsize if plan.max_steps is None else step + plan.max_steps


def left_of(progress: Any, last_epoch: int, last_step: int, in_epoch: int | None) -> tuple[int | None, int | None]:
    """How many epochs and optimizer steps are left to a run, of epochs of so many steps; None is not known."""
    epochs = None if last_epoch == sys.maxsize else max(0, last_epoch - progress.epoch)
    steps = None if last_step == sys.maxsize else max(0, last_step - progress.step)
    if not in_epoch:
        return epochs, steps
    if epochs is not None:
        steps = min(max(0, in_epoch * epochs - progress.epoch_step), sys.maxsize if steps is None else steps)
    assert steps is not None  # `check_run` has refused a run without any end.
    return (steps + progress.epoch_step) // in_epoch, steps


def spans(
    trainer: Trainer, plan: Plan, in_epoch: int | None, leaves: bool = False
) -> tuple[scheduling.Span, scheduling.Span]:
    """Return the epochs and the optimizer steps that this call of ``run`` covers; it may leave an open epoch first."""
    progress = trainer.progress_checker
    last_epoch, last_step = bounds(trainer, plan)
    if leaves:
        progress, last_epoch = replace(progress), min(last_epoch + 1, sys.maxsize)
        progress.close_epoch()
    present = (progress.epoch, progress.step)
    start = present if trainer._calls == len(progress.run_starts) else progress.run_starts[trainer._calls]
    left = left_of(progress, last_epoch, last_step, in_epoch)
    epochs, steps = map(scheduling.Span, start, present, left)
    return epochs, steps


def steps_per_epoch(plan: Plan, trainer: Trainer, wrapped: Any) -> int | None:
    """Return the optimizer steps of an epoch over a loader that ``wrap_loader`` returned; None is unknown."""
    known = [count for count in (plan.steps_per_epoch, trainer.steps_in(wrapped)) if count is not None]
    return min(known, default=None)


def total_of(plan: Plan, in_epoch: int | None) -> int | None:
    """Return the optimizer steps that a call of ``run`` is planned to take from its beginning; None is unknown."""
    whole = None if plan.n_epoch is None or in_epoch is None else plan.n_epoch * in_epoch
    return min((count for count in (whole, plan.max_steps) if count is not None), default=None)


def begin_run(trainer: Trainer, loader: Any, plan: Plan) -> int:
    """Find where this call of ``run`` began and is to end, and refuse a schedule that does not fit."""
    progress = trainer.progress_checker
    is_new = trainer._calls == len(progress.run_starts)
    last_epoch, last_step = bounds(trainer, plan)
    wrapped = _fit_loader(trainer, loader, progress.epoch < last_epoch and progress.step < last_step)
    leaves = is_new and is_left(trainer, wrapped)
    optim.check_closures(trainer._optimizers, type(trainer))
    has_metric = trainer._valid[0] is not None or trainer.history.watches_training
    in_epoch = steps_per_epoch(plan, trainer, wrapped)
    if trainer._calls + 1 >= len(progress.run_starts):
        scheduling.check_run(trainer, *spans(trainer, plan, in_epoch, leaves), in_epoch, has_metric)
    elif trainer.is_main:  # This call is over, and was checked as it began.
        warn_of_early_end(progress, trainer._calls, plan.n_epoch, plan.max_steps)
    if is_new:
        from zae.loop.trial import try_validation  # It imports this module.

        try_validation(trainer)
    if leaves:  # That epoch is not one of this call.
        leave_epoch(trainer, wrapped)
        last_epoch = min(last_epoch + 1, sys.maxsize)
    if is_new:
        progress.run_starts.append([progress.epoch, progress.step])
        progress.stop_reason = None
    trainer._calls += 1
    trainer._max_step, trainer._epoch_steps = last_step, plan.steps_per_epoch or 0
    trainer._position.restore_random()
    return last_epoch


def _fit_loader(trainer: Trainer, loader: Any, has_more: bool) -> Any:
    """Wrap the loader of a call of ``run``, and refuse one that cannot continue the epoch that a state is in."""
    call, starts, position = trainer._calls, trainer.progress_checker.run_starts, trainer._position
    is_new = call == len(starts)
    if has_more and not is_new:
        position.deal_anew(trainer, loader)
    wrapped = trainer.wrap_loader(loader, True)
    if has_more:
        position.check(wrapped, is_new)
    if call == len(starts) - 1:
        position.note_loader(wrapped)
    return wrapped


def is_left(trainer: Trainer, loader: Any) -> bool:
    """Whether an epoch is open that this loader, after ``wrap_loader``, cannot continue."""
    return trainer.progress_checker.epoch_batch > 0 and not trainer._position.is_of(loader)


def leave_epoch(trainer: Trainer, loader: Any) -> None:
    """Close the epoch that is open where another loader comes."""
    if is_left(trainer, loader):
        progress = trainer.progress_checker
        _log.info("epoch %d was left open; another loader begins the next", progress.epoch + 1)
        progress.close_epoch()


def goes_on(trainer: Trainer, loader: Any, last_epoch: int) -> bool:
    """Whether there is an epoch to begin, or to go on with."""
    progress = trainer.progress_checker
    if progress.epoch >= last_epoch or trainer._due:
        return False
    if progress.step < trainer._max_step and not trainer.should_stop:
        return True
    # A state of the run's last step, if that was an epoch's last too: the epoch is still to be closed.
    return trainer._position.is_restored and _is_full(trainer, trainer.wrap_loader(loader, True))


def _is_full(trainer: Trainer, loader: Any) -> bool:
    """Whether the open epoch has all of its steps, or batches."""
    progress = trainer.progress_checker
    return progress.epoch_batch > 0 and (
        progress.epoch_step == trainer._epoch_steps or progress.epoch_batch == length_of(loader)
    )


def check_optimizer(trainer: Trainer) -> None:
    """Refuse to train a trainer that was made to evaluate, and toggled."""
    if trainer.optimizer is None:
        raise ConfigError("optimizer is None, and training needs one; give it to the trainer, or use mode='test'")


def begin_steps(trainer: Trainer) -> None:
    """Set a trainer up for a step that no run makes."""
    trainer._set_up()
    if trainer.mode == "train":
        optimizer_modes.begin_training(trainer)


def open_epoch(trainer: Trainer, loader: Any) -> None:
    """Begin an epoch, or go on with the one that a stop, a kill or ``max_steps`` left open."""
    progress = trainer.progress_checker
    check_optimizer(trainer)
    _warn_of_unheld(trainer)
    for name, held in (("optimizer", trainer._optimizers), ("scheduler", trainer._schedulers)):
        if [*optim.named(getattr(trainer, name)).values()] != [*held.values()]:
            raise ConfigError(
                f"trainer.{name} was replaced within a run, which goes on with the one it has; replace it between two "
                "calls of run, or change what is in its param_groups"
            )
    leave_epoch(trainer, loader)
    if not progress.epoch_batch:
        trainer.log_train.begin_epoch()
        trainer.log_test.clear()
    trainer._due = ""
    optimizer_modes.begin_training(trainer)
    binding.bind(trainer)
    trainer.zero_grad()  # A step that an exception cut short has left its gradients.
    if isinstance(trainer.model, nn.Module) and not trainer.model.training:
        trainer.model.train()
    trainer._bar.open(f"epoch {progress.epoch + 1}", length_of(loader), progress.epoch_batch)


def _warn_of_unheld(trainer: Trainer) -> None:
    """Warn of parameters that want a gradient and that no optimizer holds, of each of them once."""
    known = vars(trainer).setdefault("_unheld", set())
    names = [name for name in optim.unheld(trainer.unwrap(), trainer._optimizers) if name not in known]
    known.update(names)
    if names and trainer.is_main:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        _log.warning(
            "no optimizer holds %s%s (%d parameters with requires_grad=True): training does not change them; give them "
            "to one, optimizer.add_param_group({'params': [...]}), or freeze them: requires_grad_(False)",
            ", ".join(names[:_SHOWN]), more, len(names),
        )  # fmt: skip


def batches_left(trainer: Trainer, loader: Any) -> Iterator[Any]:
    """Begin to walk what the open epoch has left: nothing, after the last of its so many steps."""
    progress = trainer.progress_checker
    if progress.epoch_batch and progress.epoch_step == trainer._epoch_steps:
        trainer._position.batches(loader, progress.epoch_batch, progress.batch)  # The next one follows from there.
        return iter(())
    return trainer.batches(loader)


def after_step(trainer: Trainer) -> bool:
    """Log, validate and save where it is due, in this order; say whether the epoch, or the run, ends here."""
    progress, every = trainer.progress_checker, trainer.log_every
    step = progress.step
    if every.steps and every.due_at_step(step):
        log_training(trainer)
    loader, every = trainer._valid
    if every.steps and loader is not None and every.due_at_step(step):
        _validate(trainer, "step")
    trainer.checkpoint()
    if trainer._bar.shown and trainer._bar.due():
        trainer._bar.update(progress.epoch_batch, lambda: shown(trainer))
    return step >= trainer._max_step or progress.epoch_step == trainer._epoch_steps or trainer.should_stop


def is_complete(trainer: Trainer, loader: Any, batches: Iterator[Any]) -> bool:
    """Whether the step that ends the loop over the batches is the last of the epoch."""
    progress = trainer.progress_checker
    if trainer._due:  # First of all comes its validation, when it is resumed.
        return False
    if progress.epoch_step == trainer._epoch_steps:
        return True
    # Asked for its end, a sampler may draw once more: an epoch that is complete ends like any other.
    return progress.epoch_batch == length_of(loader) and next(batches, None) is None


def close_epoch(trainer: Trainer, loader: Any, complete: bool) -> Metrics:
    """Take the means of an epoch, step its schedulers, and count it."""
    progress = trainer.progress_checker
    trainer._bar.close()
    if not progress.epoch_batch:
        used_up = "; a generator is used up after one epoch: give a list, or a class with __iter__"
        raise LoaderError(
            f"the loader gave 0 batches in epoch {progress.epoch + 1} ({describe(loader)})"
            + (used_up if progress.epoch else "; give it data")
        )
    trainer.nonfinite.share(trainer)
    if not complete:
        return Metrics(means(trainer, trainer.log_train))
    trainer.log_test.clear()
    history = trainer.history
    metrics = history.summarize("train", trainer.gather, trainer.world_size, trainer.metric_on_epoch_end)
    history.record("train", metrics, progress.place, optim.learning_rates(trainer._optimizers))
    if trainer.log_every.due_at_epoch(progress.epoch + 1):
        log_training(trainer, trainer.train_metrics)
    trainer.scheduler_step("epoch")
    progress.close_epoch()
    trainer._position.forget()
    return trainer.train_metrics


def make_up(trainer: Trainer) -> None:
    """Make the validation that the state of this run has begun, and what comes after it."""
    if trainer._calls != len(trainer.progress_checker.run_starts):
        return  # It is of a later call of ``run``.
    optimizer_settings.warn(trainer)
    if trainer._due == "epoch":
        end_epoch(trainer)
    elif trainer._due:
        _validate(trainer, "step")
        trainer.checkpoint()


def end_epoch(trainer: Trainer) -> None:
    """Judge the epoch that has just been closed, tell of its end, and save."""
    loader, every = trainer._valid
    try:
        if trainer._due or (loader is not None and every.due_at_epoch(trainer.progress_checker.epoch)):
            _validate(trainer, "epoch")
        if not trainer._due:
            _judge_epoch(trainer, loader)
            trainer.on_epoch_end()
    finally:
        if not trainer._due:  # Else the validation that is to be repeated may read it.
            trainer.log_train.free()
    trainer.checkpoint()


def _validate(trainer: Trainer, moment: str) -> None:
    """Validate; where a signal asks for the end meanwhile, it stays due: the state is as before it."""
    trainer._due = moment if trainer._valid[0] is not None else ""
    if trainer._due:
        with suppress(GivenUp):
            trainer.validate()
            trainer._due = ""


def _judge_epoch(trainer: Trainer, loader: Any) -> None:
    """Judge the epoch by its training metrics where nothing is validated, and show it."""
    if loader is None or trainer.history.watches_training:
        update_best(trainer, "train", trainer.train_metrics)
    step, shown = trainer.progress_checker.step, dict(trainer.train_history[-1])
    if trainer.valid_history and trainer.valid_history[-1]["step"] == step:
        shown.update(trainer.valid_history[-1])
    trainer._bar.line(shown, "best" if trainer.best.get("step") == step else "")


def update_best(trainer: Trainer, split: str, metrics: Mapping[str, float]) -> None:
    """Keep the best so far, and step the schedulers that wait for a metric."""
    history = trainer.history
    if split == "valid" and history.watches_training and trainer.monitor not in metrics:
        return
    history.check_split(split, metrics)
    score = trainer.score_of(metrics)
    if trainer.check_better(metrics):
        history.update_best(split, metrics, score, trainer.progress_checker.place)
    for name, scheduler in trainer._schedulers.items():
        if is_plateau(scheduler):
            if score is None:
                raise MonitorError(
                    f"scheduler {name} needs monitor={trainer.monitor!r}; there are {', '.join(metrics)}"
                )
            scheduler.step(score)


def note_validation(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Record the metrics of a validation."""
    trainer._due = ""
    trainer.history.record("valid", metrics, trainer.progress_checker.place)
    trainer.log({f"valid/{key}": value for key, value in metrics.items()}, trainer.progress_checker.step)


def take_validation(trainer: Trainer, metrics: dict[str, float]) -> dict[str, float]:
    """Add the metrics of a validation to the history, and update the best."""
    note_validation(trainer, metrics)
    update_best(trainer, "valid", metrics)
    return metrics


def log_training(trainer: Trainer, means: Mapping[str, float] | None = None) -> None:
    """Log the means since the last record (or those given), the learning rates and the gradient norm."""
    if means is None:  # Else the epoch has just been closed.
        trainer.nonfinite.share(trainer)
    sums = merge_sums(trainer.gather(trainer.log_train.take_sums()))
    since = means or {key: total / weight for key, (total, weight) in sums.items()}
    record = {f"train/{key}": value for key, value in since.items()} | optim.learning_rates(trainer._optimizers)
    if trainer.grad_norm is not None:
        record["grad_norm"] = float(trainer.grad_norm)
    for name in ("skipped_steps", "nonfinite_steps"):
        if getattr(trainer.progress_checker, name):
            record[name] = float(getattr(trainer.progress_checker, name))
    trainer.log(record, trainer.progress_checker.step)


def shown(trainer: Trainer) -> dict[str, float]:
    """What the bar shows."""
    return {**trainer.log_train.means(), **optim.learning_rates(trainer._optimizers)}


def means(trainer: Trainer, log: EpochLog) -> dict[str, float]:
    """The means over all ranks."""
    sums = merge_sums(trainer.gather(log.sums()))
    return {key: total / weight if weight else float("nan") for key, (total, weight) in sums.items()}


class Plan(NamedTuple):
    """How long a run is to be, and when it validates."""

    n_epoch: int | None
    max_steps: int | None
    valid_every: Every
    steps_per_epoch: int | None


def check_run(
    n_epoch: Any, loader: Any, valid_loader: Any, max_steps: Any, valid_every: Any, steps_per_epoch: Any
) -> Plan:
    """Refuse the arguments of ``run`` that cannot be meant."""
    if n_epoch is None and max_steps is None:
        raise ConfigError("n_epoch is None, so the run would not end; give a number of epochs, or max_steps=...")
    argument_checks.check_count("n_epoch", n_epoch, optional=max_steps is not None)
    argument_checks.check_count("max_steps", max_steps, optional=True)
    argument_checks.check_count("steps_per_epoch", steps_per_epoch, optional=True)
    check_loader(loader)
    if isinstance(valid_loader, Mapping) and not valid_loader:
        raise LoaderError("valid_loader is an empty dict; give loaders by name, or None")
    for name, each in valid_loader.items() if isinstance(valid_loader, Mapping) else [("", valid_loader)]:
        if each is not None:
            check_loader(each, f"valid_loader[{name!r}]" if name else "valid_loader")
    return Plan(n_epoch, max_steps, Every.parse(valid_every, "valid_every", Every(epochs=1)), steps_per_epoch)


def describe_trainer(trainer: Trainer) -> str:
    """One line that says what and where a trainer is; nothing of its options, which may be secret."""
    progress = trainer.progress_checker
    return (
        f"{type(trainer).__name__}(model={type(trainer.unwrap()).__name__}, device={trainer.device}, "
        f"mode={trainer.mode}, epoch={progress.epoch}, step={progress.step})"
    )
