"""What callbacks and ``log_history`` get: every event, state and value is that of transformers.Trainer itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from torch.nn import functional
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from kit import hf
from zae import Trainer
from zae.addons import CallbackAddon, HuggingFaceAddon
from zae.addons.callbacks.calls import FOREIGN_EVENTS

Task = Trainer.add_on(HuggingFaceAddon, CallbackAddon)
STATE = ("epoch", "global_step", "max_steps", "num_train_epochs", "train_batch_size", "best_metric",
         "best_global_step", "is_local_process_zero", "is_world_process_zero", "trial_name")  # fmt: skip
TIMES = ("runtime", "per_second", "total_flos", "model_preparation_time")


def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """The mean over the labels of a window, which Transformers leaves to the function with accumulation."""
    total = functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def values_of(record: Any) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not any(time in key for time in TIMES)}


class Recorder(TrainerCallback):
    """Notes each event with the state, the flags and the records."""

    def __init__(self) -> None:
        self.rows: list[Any] = []


def _note(event: str) -> Any:
    def method(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        records = [values_of(given[name]) for name in ("logs", "metrics") if name in given]
        self.rows.append((event, {name: getattr(state, name) for name in STATE}, *records))

    return method


for _event in FOREIGN_EVENTS:
    setattr(Recorder, _event, _note(_event))


class Asks(TrainerCallback):
    """Sets flags at a step."""

    def __init__(self, step: int, *flags: str) -> None:
        self.step, self.flags = step, flags

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for flag in self.flags if state.global_step == self.step else ():
            setattr(control, flag, True)
        return control


def numbers_of(value: Any) -> Iterator[float]:
    """The numbers in nested values, in their order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from numbers_of(each)
    elif isinstance(value, (int, float)):
        yield value


def shape_of(value: Any) -> Any:
    """Nested values without the numbers, which are compared by themselves."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape_of(each) for each in value]
    return None if isinstance(value, (int, float)) else repr(value)


EPOCHS = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"}
STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
WINDOWS = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "each step": {"logging_steps": 1},
    "five steps": {"logging_steps": 5},
    "no logs": {"logging_strategy": "no"},
    "logs of epochs": {"logging_strategy": "epoch"},
    "first step": {"logging_first_step": True, "logging_steps": 4},
    "share of logs": {"max_steps": 8, "logging_steps": 0.25},
    "epochs": EPOCHS,
    "three epochs": {**EPOCHS, "num_train_epochs": 3},
    "steps": STEPS,
    "each step evaluated": {**STEPS, "eval_steps": 1, "save_steps": 3},
    "last step beside the cadence": {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
    },
    "share of evaluations": {"eval_strategy": "steps", "eval_steps": 0.25},
    "delay in epochs": {"eval_strategy": "epoch", "eval_delay": 2, "num_train_epochs": 3},
    "delay in steps": {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 4},
    "at the start": {"eval_on_start": True, "eval_strategy": "epoch"},
    "at the start alone": {"eval_on_start": True},
    "at the start of steps": {"eval_on_start": True, **STEPS},
    "max_steps": {"max_steps": 4},
    "max_steps evaluated": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 3},
    "max_steps saved": {"max_steps": 4, "save_strategy": "steps", "save_steps": 3},
    "max_steps in a later epoch": {"max_steps": 7, **STEPS},
    "one and a half epochs": {"num_train_epochs": 1.5},
    "one and a half epochs saved": {"num_train_epochs": 1.5, "save_strategy": "epoch"},
    "windows": WINDOWS,
    "windows of each step": {**WINDOWS, "logging_steps": 1},
    "windows with epochs": {**WINDOWS, **EPOCHS},
    "windows with steps": {**WINDOWS, **STEPS},
    "windows within an epoch": {**WINDOWS, "max_steps": 4, "logging_steps": 1},
    "no clipping": {"max_grad_norm": 0.0},
    "clipping": {"max_grad_norm": 0.01},
    "constant": {"lr_scheduler_type": "constant"},
    "warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "logging_steps": 1},
    "weight decay": {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1},
    "drop last": {"dataloader_drop_last": True, **EPOCHS},
    "sequential": {"train_sampling_strategy": "sequential"},
    "larger is better": {**EPOCHS, "greater_is_better": True},
    "early stopping": {**EPOCHS, "num_train_epochs": 4, "learning_rate": 2.0, "callbacks": [EarlyStoppingCallback(1)]},
    "stop": {"callbacks": [Asks(2, "should_training_stop")]},
    "flags": {"callbacks": [Asks(2, "should_evaluate", "should_log")], "eval_strategy": "steps", "eval_steps": 5},
    # Two orders differ: several sets are read before the first is logged, and a cut epoch is evaluated before its end.
    "several sets": {
        "eval_strategy": "epoch",
        "metric_for_best_model": "eval_two_loss",
        "without": "on_prediction_step",
        "sets": {"one": hf.dataset(count=5), "two": hf.dataset(count=9)},
    },
    "one and a half epochs evaluated": {"num_train_epochs": 1.5, "eval_strategy": "epoch", "without": "on_epoch_end"},
    "again": {"trains": 2, "logging_steps": 1},
}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_events_and_records_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    """With ``train()``, ``evaluate()`` and ``predict()``."""
    settings = {"optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 2, "logging_steps": 2, **SCENARIOS[name]}
    trains, callbacks = settings.pop("trains", 1), settings.pop("callbacks", [])
    sets, without = settings.pop("sets", hf.dataset(count=9)), settings.pop("without", "")
    runs = []
    for kind in (transformers.Trainer, Task):
        recorder = Recorder()
        args = hf.arguments(tmp_path / kind.__name__, **{"metric_for_best_model": "loss", **settings})
        trainer = kind(hf.make_model(), args=args, train_dataset=hf.dataset(), eval_dataset=sets,
                       compute_loss_func=loss_of, callbacks=[recorder, *copy.deepcopy(callbacks)])  # fmt: skip
        if kind is transformers.Trainer:
            trainer.remove_callback(PrinterCallback)
        outputs = [trainer.train() for _ in range(trains)]
        evaluated = trainer.evaluate()
        trainer.predict(hf.dataset(count=9))
        history = [values_of(row) for row in trainer.state.log_history]
        returned = [(each.global_step, each.training_loss, each.metrics["epoch"]) for each in outputs]
        rows = [row for row in recorder.rows if row[0] != without]
        runs.append([rows, history, returned, values_of(evaluated)])
    for expected, found in zip(*runs, strict=True):
        assert shape_of(found) == shape_of(expected)
        assert list(numbers_of(found)) == pytest.approx(list(numbers_of(expected)), abs=2e-5)
