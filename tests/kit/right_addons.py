"""Add-ons as a user writes them, each in a few lines, without a fault: `check_addon` has to pass all of them."""

from __future__ import annotations

import contextlib
import csv
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zae import AddOnBase, replaces


class SAMAddon(AddOnBase):
    """Step by the gradient at the worst point within ``rho`` of the weights (sharpness-aware minimization)."""

    layer = "loop"

    def __init__(self, *args: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rho = rho

    @replaces  # It calls super() twice.
    def gradients(self, batch: Any) -> Any:
        outputs = super().gradients(batch)
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in trained]
        norm = torch.stack([parameter.grad.norm() for parameter in trained]).norm()
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(parameter.grad * (self.rho / (norm + 1e-12)))
        self.zero_grad()
        try:
            super().gradients(batch)
        finally:
            with torch.no_grad():
                for parameter, value in zip(trained, before):
                    parameter.copy_(value)
        return outputs  # The loss of the weights themselves, not of the worst point.


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


class MixupAddon(AddOnBase):
    """Train on mixtures of neighbouring samples; the targets have to be numbers that can be mixed."""

    layer = "model"

    def __init__(self, *args: Any, mixup_alpha: float = 0.4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mixup_alpha = mixup_alpha
        self.mixup_random = random.Random(0)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        if self.mode == "test":
            return super().train_step(batch)
        share = self.mixup_random.betavariate(self.mixup_alpha, self.mixup_alpha)
        return super().train_step([share * each + (1 - share) * each.roll(1, 0) for each in batch])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "MixupAddon": self.mixup_random.getstate()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        own, rest = self.take(state, "MixupAddon", strict)
        super().load_state_dict(rest, strict)
        if own is not None:
            self.mixup_random.setstate(own)


class WarmUpAddon(AddOnBase):
    """Let the learning rate rise from zero in the first steps; it multiplies what the schedule gives."""

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


class GradientNoiseAddon(AddOnBase):
    """Add normal noise to every gradient before it is clipped, from a random stream of its own."""

    layer = "loop"

    def __init__(self, *args: Any, noise_std: float = 0.01, noise_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise_std = noise_std
        self.noise = torch.Generator().manual_seed(noise_seed)

    def unscale(self) -> None:
        super().unscale()
        for parameter in self.parameters:
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=self.noise, dtype=parameter.dtype)
                parameter.grad.add_(noise.to(parameter.device), alpha=self.noise_std)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "GradientNoiseAddon": self.noise.get_state()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        own, rest = self.take(state, "GradientNoiseAddon", strict)
        super().load_state_dict(rest, strict)
        if own is not None:
            self.noise.set_state(own)


class ThawAddon(AddOnBase):
    """Keep the layers whose names begin with ``thaw_prefix`` frozen until epoch ``thaw_at``."""

    layer = "loop"

    def __init__(self, *args: Any, thaw_prefix: str, thaw_at: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.thaw_prefix, self.thaw_at = thaw_prefix, thaw_at
        self.to_thaw: list[str] = []

    def setup(self) -> None:
        super().setup()
        named = self.unwrap().named_parameters()  # What the user has frozen stays so.
        self.to_thaw = [name for name, p in named if p.requires_grad and name.startswith(self.thaw_prefix)]

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self._require(self.progress_checker.epoch >= self.thaw_at)

    def teardown(self) -> None:
        self._require(True)
        super().teardown()

    def _require(self, value: bool) -> None:
        for name in self.to_thaw:
            self.unwrap().get_parameter(name).requires_grad_(value)


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


class DistillationAddon(AddOnBase):
    """Add the distance to the outputs of a teacher to the loss."""

    layer = "model"

    def __init__(self, *args: Any, teacher: nn.Module, teacher_weight: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.teacher_weight = teacher, teacher_weight

    def setup(self) -> None:
        super().setup()
        self.teacher.to(self.device).eval()

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        out = super().train_step(batch)
        if self.mode == "test":
            return out
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        distance = nn.functional.mse_loss(self.model(batch[0]), wanted)
        return {**out, "loss": out["loss"] + self.teacher_weight * distance, "distance": distance.detach()}


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


class LookAheadAddon(AddOnBase):
    """Pull the weights back towards slow ones every ``slow_every`` steps (LookAhead)."""

    layer = "loop"
    state_attributes = ("slow",)

    def __init__(self, *args: Any, slow_every: int = 5, slow_share: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow_every, self.slow_share = slow_every, slow_share
        self.slow: dict[str, Tensor] = {}

    @torch.no_grad()
    def optimizer_step(self) -> bool:
        weights = dict(self.unwrap().named_parameters())
        if not self.slow:
            self.slow = {name: weight.detach().clone() for name, weight in weights.items()}
        stepped = super().optimizer_step()
        if stepped and (self.progress_checker.step + 1) % self.slow_every == 0:
            for name, slow in self.slow.items():
                slow.lerp_(weights[name], self.slow_share)
                weights[name].copy_(slow)
        return stepped


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
    (SAMAddon, {}),
    (SWAAddon, {}),
    (MixupAddon, {}),
    (WarmUpAddon, {"warm_up_steps": 5}),
    (GradientNoiseAddon, {}),
    (ThawAddon, {"thaw_prefix": "0."}),
    (HistogramAddon, {}),
    (DistillationAddon, {"teacher": nn.Linear(3, 2)}),
    (CurriculumAddon, {"difficulty": size_of_inputs}),
    (LookAheadAddon, {"slow_every": 3}),
    (CSVAddon, {"csv_path": "log.csv"}),
    (TimeLimitAddon, {"seconds": 3600}),
    (NoDecayAddon, {}),
    (CountAddon, {}),
    (RoundedWeightsAddon, {}),
]
"""Each with options, to be given to `check_addon`."""
