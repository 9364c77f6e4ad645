"""Add-ons as a user writes them, each in a few lines, without a fault: `check_addon` has to pass all of them."""

from __future__ import annotations

import contextlib
import csv
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zae import AddOnBase


class SWAAddon(AddOnBase):
    """End with the mean of the weights after each epoch from ``swa_from`` on (stochastic weight averaging)."""

    layer = "loop"
    state_attributes = ("swa_count", "swa_mean")

    def __init__(self, *args: Any, swa_from: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.swa_from, self.swa_count = swa_from, 0
        self.swa_mean: dict[str, Tensor] = {}

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.progress_checker.epoch <= self.swa_from:
            return
        self.swa_count += 1
        for name, parameter in self.unwrap().named_parameters():
            mean = self.swa_mean.setdefault(name, torch.zeros_like(parameter, requires_grad=False))
            mean.lerp_(parameter.detach(), 1 / self.swa_count)

    @torch.no_grad()
    def on_run_end(self) -> None:
        super().on_run_end()
        for name, parameter in self.unwrap().named_parameters():
            if name in self.swa_mean:
                parameter.copy_(self.swa_mean[name])


class WarmUpAddon(AddOnBase):
    """Let the learning rate rise from zero in the first steps; it multiplies what the schedule returns."""

    layer = "loop"

    def __init__(self, *args: Any, warm_up_steps: int = 100, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.warm_up_steps = warm_up_steps

    def step_one(self, optimizer: torch.optim.Optimizer) -> bool:
        rates = [group["lr"] for group in optimizer.param_groups]
        share = min(1.0, (self.progress_checker.step + 1) / self.warm_up_steps)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * share
        try:
            return super().step_one(optimizer)
        finally:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate


class HistogramAddon(AddOnBase):
    """Keep a histogram of every weight, as it is at the end of the last epoch."""

    def __init__(self, *args: Any, bins: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bins = bins
        self.histograms: dict[str, list[float]] = {}

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        weights = {name: weight.detach().float() for name, weight in self.unwrap().named_parameters()}
        self.histograms = {name: torch.histc(weight, self.bins).tolist() for name, weight in weights.items()}


class CurriculumAddon(AddOnBase):
    """Train on the easiest samples of each batch first, and on all of them from ``curriculum_epochs`` on."""

    layer = "model"

    def __init__(
        self, *args: Any, difficulty: Callable[[Any], Tensor], curriculum_epochs: int = 5, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.difficulty, self.curriculum_epochs = difficulty, curriculum_epochs

    def to_device(self, batch: Any) -> Any:
        batch = super().to_device(batch)
        if self.mode == "test":
            return batch
        share = min(1.0, (1 + self.progress_checker.epoch) / self.curriculum_epochs)
        order = self.difficulty(batch).argsort()
        easiest = order[: math.ceil(share * len(order))]
        return [each[easiest] for each in batch]


class CSVAddon(AddOnBase):
    """Append every record of metrics to a file of comma-separated values: step, name, value."""

    def __init__(self, *args: Any, csv_path: str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.csv_path = Path(csv_path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        if self.is_main:
            with self.csv_path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([step, name, float(value)] for name, value in metrics.items())


class TimeLimitAddon(AddOnBase):
    """End the run, with all that belongs to its end, after so many seconds."""

    layer = "control"

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds, self.ends_at = seconds, math.inf

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.ends_at = time.monotonic() + self.seconds

    def checkpoint(self) -> None:
        if time.monotonic() >= self.ends_at:
            self.stop(f"{self.seconds} seconds are over")
        super().checkpoint()


class NoDecayAddon(AddOnBase):
    """Decay no biases and no norms: they move to a parameter group without weight decay."""

    layer = "loop"

    def build_optimizer(self) -> Any:
        optimizer = super().build_optimizer()
        if len(optimizer.param_groups) == 1:  # A second run gets the groups of the first.
            group = optimizer.param_groups[0]
            vectors = [parameter for parameter in group["params"] if parameter.dim() < 2]
            group["params"] = [parameter for parameter in group["params"] if parameter.dim() >= 2]
            settings = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group({**settings, "params": vectors, "weight_decay": 0.0})
        return optimizer


class CountAddon(AddOnBase):
    """Add the number of batches to the metrics of each epoch."""

    def metric_on_epoch_end(self) -> Mapping[str, float]:
        log = self.log_train if self.mode == "train" else self.log_test
        return {**super().metric_on_epoch_end(), "batches": float(len(log["loss"]))}


class RoundedWeightsAddon(AddOnBase):
    """Evaluate with rounded weights, and train with the exact ones."""

    layer = "loop"

    def __init__(self, *args: Any, digits: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digits = digits

    @contextlib.contextmanager
    def evaluation_context(self) -> Iterator[None]:
        before = {name: weight.detach().clone() for name, weight in self.unwrap().named_parameters()}
        try:
            with super().evaluation_context():
                for weight in self.unwrap().parameters():
                    weight.data.copy_(weight.data.round(decimals=self.digits))
                yield
        finally:
            for name, weight in self.unwrap().named_parameters():
                weight.data.copy_(before[name])


def size_of_inputs(batch: Any) -> Tensor:
    """Return how far the inputs of each sample are from zero."""
    return batch[0].abs().sum(1)


RIGHT: list[tuple[Any, dict[str, Any]]] = [
    (SWAAddon, {}),
    (WarmUpAddon, {"warm_up_steps": 5}),
    (HistogramAddon, {}),
    (CurriculumAddon, {"difficulty": size_of_inputs}),
    (CSVAddon, {"csv_path": "log.csv"}),
    (TimeLimitAddon, {"seconds": 3600}),
    (NoDecayAddon, {}),
    (CountAddon, {}),
    (RoundedWeightsAddon, {}),
]
"""Each with options, to be given to `check_addon`."""
