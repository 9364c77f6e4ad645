"""How long a run with the arguments of Transformers takes, and when it is evaluated."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace
from typing import Any

from zae.compose.introspect import slots_of
from zae.compose.options import option_value
from zae.errors import ConfigError
from zae.loop.cadence import Every
from zae.loop.progress import ProgressChecker

__all__ = ["NEVER", "EveryAnd", "convert_evaluation", "convert_length", "cut_at", "steps_of", "train"]

NEVER = Every(epochs=sys.maxsize)


@dataclasses.dataclass(frozen=True, repr=False)
class EveryAnd(Every):
    """A cadence of steps, and single steps beside it: the first, or the last of a run; they count from ``first``."""

    also: tuple[int, ...] = ()
    first: int = 0

    def __repr__(self) -> str:
        """Return it as it is written in a script."""
        first = f", first={self.first}" if self.first else ""
        return f"EveryAnd(steps={self.steps}, after={self.after}, also={self.also}{first})"

    def due_at_step(self, step: int) -> bool:
        """Return whether it is due after this optimizer step."""
        step -= self.first
        return super().due_at_step(step) or (step in self.also and step > self.after)


def steps_of(name: str, args: Any, total: int | None) -> int:
    """Return a number of steps; less than 1 is a share of the run."""
    value = getattr(args, name)
    if value >= 1:
        return int(value)
    if total is None:
        raise ConfigError(
            f"{name}={value} is a share of the run, whose steps are not known here; write "
            "from_arguments(args, total_steps=...), or a whole number of steps"
        )
    return math.ceil(total * value)


def convert_length(args: Any, to: Any) -> None:
    """Carry num_train_epochs and max_steps."""
    if args.max_steps > 0:
        to.run.update(n_epoch=None, max_steps=args.max_steps)
    elif float(args.num_train_epochs).is_integer():
        to.run["n_epoch"] = int(args.num_train_epochs)
    elif to.total_steps is None:
        to.report["num_train_epochs"] = (
            f"num_train_epochs={args.num_train_epochs} ends within an epoch: converted.train(trainer, loader) counts "
            "its steps; for trainer.run(), write from_arguments(args, total_steps=...)"
        )
    else:
        to.run.update(n_epoch=math.ceil(args.num_train_epochs), max_steps=to.total_steps)


def convert_evaluation(args: Any, to: Any, first_step: int = 0) -> None:
    """Carry eval_strategy, eval_steps and eval_delay, counted from a step on."""
    after = max(0, math.ceil(args.eval_delay) - 1)
    if args.eval_strategy == "no":
        to.run["valid_every"] = NEVER
    elif args.eval_strategy == "epoch":
        to.run["valid_every"] = Every(epochs=1, after=after)
    else:
        last = () if to.total_steps is None else (to.total_steps,)
        if last or args.eval_steps >= 1:
            steps = steps_of("eval_steps", args, to.total_steps)
            to.run["valid_every"] = EveryAnd(steps=steps, after=after, also=last, first=first_step)
        else:
            to.report["eval_steps"] = (
                f"eval_steps={args.eval_steps} is a share of the run: converted.train(trainer, loader, valid_loader) "
                "counts its steps; for trainer.run(), write from_arguments(args, total_steps=...)"
            )
        if not last:
            to.report["eval_strategy"] = (
                "eval_strategy='steps': the last step is evaluated by converted.train(trainer, loader, valid_loader), "
                "or with from_arguments(args, total_steps=...)"
            )


def total_of(args: Any, in_epoch: int | None) -> int | None:
    """Return the optimizer steps of a call of ``train()``; None for a loader without a length."""
    if args.max_steps > 0:
        return int(args.max_steps)
    return math.ceil(args.num_train_epochs * in_epoch) if in_epoch else None


def cut_at(args: Any, in_epoch: int | None) -> int:
    """Return the step within an epoch at which a run ends and is evaluated; 0 where it ends with an epoch."""
    total = total_of(args, in_epoch)
    if not in_epoch or total is None:
        return 0
    return 0 if total % in_epoch == 0 or args.eval_delay > total / in_epoch else total


def begin_of_next_call(progress: ProgressChecker) -> tuple[int, int]:
    """Return the epoch and the step at which the next call of ``run`` begins, or began in the loaded state."""
    calls = progress.run_calls
    if calls.must_replay:
        epoch, step = calls.starts[calls.index]
        return epoch, step
    return progress.epoch + bool(progress.epoch_batch), progress.step


def train(
    trainer: Any,
    args: Any,
    loader: Any = None,
    valid_loader: Any = None,
    total_steps: int | None = None,
) -> Any:
    """Run a trainer as long as arguments say, evaluating as they say; load the best weights at the end.

    ``args`` is a TrainingArguments, or has its attributes for the length and the evaluation. Without loaders, they are
    those of HuggingFaceAddon.
    """
    _, first_step = begin_of_next_call(trainer.progress_checker)
    loader = trainer.get_train_dataloader() if loader is None else loader
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if valid_loader is None and evaluates and hasattr(trainer, "get_eval_dataloader"):
        if trainer.eval_dataset is None:
            strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
            raise ConfigError(f"eval_strategy={strategy!r} needs data; write eval_dataset=dataset")
        valid_loader = trainer.get_eval_dataloader()
    steps = trainer.steps_per_epoch(loader)
    total_steps = total_of(args, steps) or total_steps
    if args.max_steps <= 0 and not steps and not float(args.num_train_epochs).is_integer():
        raise ConfigError(
            f"num_train_epochs={args.num_train_epochs} of a loader without a length has no end; write max_steps"
        )
    limits = SimpleNamespace(total_steps=total_steps, run={}, report={})
    convert_length(args, limits)
    convert_evaluation(args, limits, first_step)
    is_of_run = option_value(trainer, "eval_on_start", False)  # HuggingFaceAddon evaluates when the run has begun.
    if (
        args.eval_on_start
        and not is_of_run
        and valid_loader is not None
        and trainer.progress_checker.step == first_step
    ):
        trainer.evaluate(valid_loader)
    valid_loader = None if args.eval_strategy == "no" else valid_loader
    metrics = trainer.run(loader=loader, valid_loader=valid_loader, **limits.run)
    has_checkpoints = "state" in slots_of(type(trainer))
    if args.load_best_model_at_end and has_checkpoints and trainer.best_path is not None:
        trainer.restore_best()
    return metrics
