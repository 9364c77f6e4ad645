"""Callbacks of the installed Transformers, unchanged: the same events, stop and logs as in its own Trainer."""

from __future__ import annotations

import ast
import json
import math
import re

import pytest
import torch
import transformers
import wandb
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback

from kit.loggers import scalars, wandb_history
from zae import Trainer
from zae.addons import CallbackAddon, GradientAccumulationAddon, StateManagerAddon
from zae.addons.callbacks.calls import FOREIGN_EVENTS


class Line(nn.Module):
    """A weight that goes from 0 to 2 in training; the validation is best where it passes 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.weight * x, labels), "logits": self.weight * x}


def rows(target, size):
    return [{"x": torch.ones(1), "labels": torch.full((1,), target)} for _ in range(size)]


class Recorder(TrainerCallback):
    """The events, with what the state holds at each."""

    def __init__(self):
        self.rows, self.keys = [], {}


def _record(event):
    def method(self, args, state, control, **kwargs):
        at = (event, round(state.epoch or 0, 4), state.global_step, state.max_steps, state.best_global_step)
        self.rows.append((*at, None if state.best_metric is None else round(state.best_metric, 5)))
        self.keys[event] = set(kwargs)
        assert isinstance(kwargs["model"], Line)

    return method


for _event in FOREIGN_EVENTS:
    setattr(Recorder, _event, _record(_event))


class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(**batch)["loss"]}

    test_step = train_step


class Theirs(transformers.Trainer):
    """In the order of the dataset."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def arguments(folder, **more):
    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", optim="sgd", learning_rate=0.05, disable_tqdm=True,
        lr_scheduler_type="constant", per_device_train_batch_size=2, per_device_eval_batch_size=4, num_train_epochs=9,
        metric_for_best_model="loss", max_grad_norm=0.0, **more,
    )  # fmt: skip


def run_theirs(folder, *callbacks, **more):
    more = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch", **more}
    trainer = Theirs(Line(), arguments(folder, load_best_model_at_end=True, **more), train_dataset=rows(2.0, 8),
                     eval_dataset=rows(1.0, 6), callbacks=list(callbacks))  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def ours(folder, *callbacks, accumulate=1, **options):
    model = Line()
    return Task.add_on(CallbackAddon, GradientAccumulationAddon, StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.05), callbacks=list(callbacks), log_bar=False,
        gradient_accumulation_steps=accumulate, save_path=folder, gradient_clip=math.inf, **options,
    )  # fmt: skip


def run_ours(folder, *callbacks, epochs=9, **options):
    trainer = ours(folder, *callbacks, **options)
    trainer.run(epochs, DataLoader(rows(2.0, 8), 2), DataLoader(rows(1.0, 6), 4))
    return trainer


@pytest.mark.parametrize("monitor", ["loss", "valid/loss", "valid_loss"])
def test_early_stopping_finds_the_metric_under_each_name_of_the_monitor(monitor, tmp_path):
    trainer = run_ours(tmp_path, EarlyStoppingCallback(1, 100.0), monitor=monitor)
    assert trainer.metrics["epoch"] == 2
    assert trainer.metrics["stop_reason"].startswith("the callback EarlyStoppingCallback set should_training_stop")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_is_that_of_transformers(accumulate, tmp_path):
    """Every event with the same epoch, step and best score; the same stop, log_history, keys and weight."""
    one, other = Recorder(), Recorder()
    theirs = run_theirs(
        tmp_path / "theirs", one, EarlyStoppingCallback(2, 0.001), gradient_accumulation_steps=accumulate
    )
    stop = EarlyStoppingCallback(2, 0.001)
    trainer = run_ours(tmp_path / "ours", other, stop, accumulate=accumulate)
    assert other.rows == one.rows
    assert other.keys == one.keys
    assert trainer.progress_checker.step == theirs.state.global_step < 36 // accumulate
    assert stop.early_stopping_patience_counter == 2
    assert "EarlyStoppingCallback set should_training_stop in on_evaluate" in trainer.metrics["stop_reason"]
    for mine, their in zip(trainer.state.log_history, theirs.state.log_history, strict=True):
        assert list(mine) == list(their)
        numbers = [key for key in their if "per_second" not in key and "runtime" not in key]
        assert [mine[key] for key in numbers] == pytest.approx([their[key] for key in numbers], abs=1e-6)


def watch(run, folder, monkeypatch, capsys):
    """Run with the callbacks of Transformers that write; return what each wrote but the time that it took."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tb"))
    wandb.init(project="p", mode="offline", dir=folder)  # Else it would continue in the folder of its first run.
    run(folder / "run", PrinterCallback, ProgressCallback(), TensorBoardCallback, WandbCallback)
    wandb.finish()
    out, err = capsys.readouterr()
    printed = [ast.literal_eval(found) for found in re.findall(r"\{.*\}", out)]
    bars = re.findall(r"\| (\d+/\d+) \[", err)
    (path,) = (folder / "wandb").glob("*run-*/*.wandb")
    timed = re.compile("runtime|per_second|total_flos")
    tables = [*printed, scalars(folder / "tb"), *wandb_history([path])]
    tables = [{key: row[key] for key in row if not timed.search(key)} for row in tables]
    return json.loads(json.dumps(tables), parse_float=lambda text: round(float(text), 5)), set(bars)


def test_those_that_print_and_log_write_what_they_write_in_transformers(tmp_path, monkeypatch, capsys):
    """PrinterCallback, ProgressCallback, TensorBoardCallback and WandbCallback (offline), with the args of this run."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    theirs, their_bars = watch(run_theirs, tmp_path / "theirs", monkeypatch, capsys)
    ours, bars = watch(run_ours, tmp_path / "ours", monkeypatch, capsys)
    assert len(ours) == len(theirs) > 2 * (9 + 9)  # Nine epochs and their validations are printed twice.
    assert ours == theirs
    ends = {"0/36", "36/36", "0/2", "2/2"}  # What is drawn between depends on the time.
    assert bars & ends == their_bars & ends == ends
