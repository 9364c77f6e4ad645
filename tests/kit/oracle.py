"""The loop as one writes it by hand, in plain PyTorch, for every set of options that the composition test tries.

Nothing of zae is imported here. Each feature is the few lines that its tutorial shows, in the one right order; what
zae's add-ons make of the same options must be bitwise what `train` makes of them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 22, 4  # Five batches of 4, and one of 2: with windows of 4, the last has two batches.


@dataclass(frozen=True)
class Options:
    """What a run is made of; each field is an option that a user may want, alone or with any other."""

    precision: str | None = None  # "bf16", "fp16", or "weights": those of the model are in bfloat16 too
    scale: float = 2.0**16  # The first loss scale of fp16.
    accumulate: int | None = None
    decay: float | None = None  # Of the average of the weights.
    patience: int | None = None  # Validations without a gain, after which the run ends.
    delta: float = 0.0
    clip: float = 0.0
    count_targets: bool = False
    scheduler: str | None = None  # Stepped by "batch" or "epoch", or "plateau" by the validation.
    validate: int | str | None = None  # Every so many steps, or "epoch".
    networks: int = 1  # With 2, there are two losses and two optimizers.
    optimizer: str = "adamw"
    epochs: int = 2
    max_steps: int | None = None
    seed: int = 0


@dataclass
class Outcome:
    """Everything that two runs must agree on to the last bit."""

    weights: dict[str, Tensor]
    optimizers: list[Any]
    schedulers: list[Any]
    average: dict[str, Tensor] | None
    scaler: dict[str, Any] | None
    train_rows: list[dict[str, float]]
    valid_rows: list[dict[str, float]]
    step_rows: list[dict[str, float]]
    step: int
    skipped: int
    stopped: bool
    random: Tensor


# ------------------------------------------------------------------------------------------ the user's own part


class Net(nn.Module):
    """What training code usually meets: a norm with running statistics, dropout, two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))


def make(options: Options) -> tuple[nn.Module, list[Any], list[Any], DataLoader[Any], DataLoader[Any] | None]:
    """Build the model, the optimizers, the schedulers and the loaders; each call gives the same."""
    torch.manual_seed(options.seed)
    model: nn.Module = Net() if options.networks == 1 else nn.ModuleDict({"a": Net(), "b": Net()})
    optimizers: list[Any] = []
    for part in [model] if options.networks == 1 else [model["a"], model["b"]]:
        if options.optimizer == "adamw":
            optimizers.append(torch.optim.AdamW(part.parameters(), lr=0.02))
        else:
            optimizers.append(torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9))
    schedulers: list[Any] = []
    for optimizer in optimizers if options.scheduler else []:
        if options.scheduler == "plateau":
            schedulers.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
        else:
            schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7))
    generator = torch.Generator().manual_seed(options.seed + 1)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    targets = torch.randn(SAMPLES, 2, generator=generator)
    mask = (torch.rand(SAMPLES, 2, generator=generator) < 0.7).float()
    mask[:, 0] = 1.0
    data = TensorDataset(inputs, targets, mask)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    valid = None if options.validate is None else DataLoader(data, batch_size=5)
    torch.manual_seed(options.seed + 2)
    return model, optimizers, schedulers, loader, valid


def losses_of(model: Any, batch: Any, options: Options) -> tuple[list[Tensor], float | None]:
    """The losses of a batch, one for each optimizer, and the targets they are the mean over where these count."""
    inputs, targets, mask = batch
    if options.count_targets:
        count = mask.sum()
        losses = [((net(inputs).float() - targets) ** 2 * mask).sum() / count for net in networks_of(model, options)]
        return losses, float(count)
    return [((net(inputs).float() - targets) ** 2).mean() for net in networks_of(model, options)], None


def networks_of(model: Any, options: Options) -> list[Any]:
    return [model] if options.networks == 1 else [model["a"], model["b"]]


# ------------------------------------------------------------------------------------------------------ the loop


def train(options: Options) -> Outcome:
    """Train by hand."""
    model, optimizers, schedulers, loader, valid_loader = make(options)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.scale) if options.precision == "fp16" else None
    if options.precision == "weights":
        to_bfloat16(model)
    average = None
    if options.decay is not None:
        average = {key: value.detach().clone() for key, value in model.state_dict().items()}
        average |= {key: value.float() for key, value in average.items() if value.dtype == torch.bfloat16}
    outcome = Outcome({}, [], [], None, None, [], [], [], 0, 0, False, torch.empty(0))
    best, waited = None, 0

    def judge(row: dict[str, float]) -> None:
        """Plateau schedulers and early stopping look at the same number."""
        nonlocal best, waited
        score = row["loss" if options.networks == 1 else "loss/a"]
        for scheduler in schedulers if options.scheduler == "plateau" else []:
            scheduler.step(score)
        if options.patience is not None:
            if best is None or best - score > options.delta:
                best, waited = score, 0
            else:
                waited += 1
                outcome.stopped = outcome.stopped or waited >= options.patience

    def validate(epoch: int) -> None:
        row = evaluate(model, average, valid_loader, options)
        outcome.valid_rows.append({"epoch": epoch, "step": outcome.step, **row})
        judge(row)

    for epoch in range(1, options.epochs + 1):
        totals: dict[str, list[float]] = {}
        complete = True
        model.train()
        for window in windows(loader, options.accumulate or 1):
            targets, recorded = step_gradients(model, scaler, window, options)
            if len(window) > 1 and options.count_targets:
                for parameter in model.parameters():
                    parameter.grad.div_(targets)
            stepped = step_optimizers(model, optimizers, scaler, options)
            if stepped and options.scheduler == "batch":
                for scheduler in schedulers:
                    scheduler.step()
            if stepped and average is not None:
                update_average(average, model, options.decay)
            model.zero_grad(set_to_none=True)
            outcome.step += 1
            outcome.skipped += not stepped
            here: dict[str, list[float]] = {}
            for losses, weight in recorded:
                record(totals, losses, weight, options)
                record(here, losses, weight, options)
            means = {key: total / weight for key, (total, weight) in here.items()}
            outcome.step_rows.append({"step": outcome.step, **means})
            if isinstance(options.validate, int) and outcome.step % options.validate == 0:
                validate(epoch)
            if outcome.stopped or outcome.step == options.max_steps:
                complete = window.is_last
                break
        if not complete:
            break
        means = {key: total / weight for key, (total, weight) in totals.items()}
        names = ["lr"] if options.networks == 1 else ["lr/a", "lr/b"]
        rates = {name: o.param_groups[0]["lr"] for name, o in zip(names, optimizers, strict=True)}
        outcome.train_rows.append({"epoch": epoch, "step": outcome.step, **means, **rates})
        if options.scheduler == "epoch":
            for scheduler in schedulers:
                scheduler.step()
        if options.validate == "epoch":
            validate(epoch)
        elif options.validate is None:
            judge(means)
        if outcome.stopped or outcome.step == options.max_steps:
            break

    outcome.weights = model.state_dict()
    outcome.optimizers = [optimizer.state_dict() for optimizer in optimizers]
    outcome.schedulers = [scheduler.state_dict() for scheduler in schedulers]
    outcome.average, outcome.scaler = average, scaler.state_dict() if scaler else None
    outcome.random = torch.get_rng_state()
    return outcome


class Window(list):
    """The batches of one optimizer step."""

    is_last = False


def windows(loader: DataLoader[Any], size: int) -> Iterator[Window]:
    """Group an epoch's batches; the last window has what is left."""
    left, window = len(loader), Window()
    for batch in loader:
        window.append(batch)
        left -= 1
        if len(window) == size or not left:
            window.is_last = not left
            yield window
            window = Window()


def step_gradients(
    model: nn.Module, scaler: Any, window: Window, options: Options
) -> tuple[float, list[tuple[list[Tensor], float]]]:
    """Forward and backward of a window: the mean of its losses, or their sum weighed by targets."""
    all_targets, recorded = 0.0, []
    for batch in window:
        with autocast(options):
            losses, targets = losses_of(model, batch, options)
        for index, loss in enumerate(losses):
            if len(window) > 1:
                loss = loss / len(window) if targets is None else loss * targets
            if scaler is not None:
                loss = scaler.scale(loss)
            inputs = None if options.networks == 1 else list(networks_of(model, options)[index].parameters())
            loss.backward(inputs=inputs)
        all_targets += targets or 0.0
        recorded.append((losses, targets or len(batch[0])))
    return all_targets, recorded


def to_bfloat16(model: nn.Module) -> None:
    """Convert the linear layers."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, nn.Linear) else ():
            parameter.data = parameter.data.to(torch.bfloat16)


def step_optimizers(model: nn.Module, optimizers: list[Any], scaler: Any, options: Options) -> bool:
    """Unscale, clip, step; whether it took place."""
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    if options.clip:
        for network in networks_of(model, options):
            nn.utils.clip_grad_norm_(network.parameters(), options.clip)
    if scaler is None:
        for optimizer in optimizers:
            optimizer.step()
        return True
    before = scaler.get_scale()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return bool(scaler.get_scale() >= before)


def autocast(options: Options) -> contextlib.AbstractContextManager[Any]:
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "weights": torch.bfloat16}
    if options.precision is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=types[options.precision])


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, decay: float | None) -> None:
    """Parameters are averaged, buffers are copied."""
    trained = dict(model.named_parameters())
    for key, value in model.state_dict().items():
        if key in trained:
            average[key].mul_(decay).add_(value, alpha=1 - decay)
        else:
            average[key].copy_(value)


@torch.no_grad()
def evaluate(model: nn.Module, average: Any, loader: Any, options: Options) -> dict[str, float]:
    """Means over a loader, of the averaged weights where there are some; training's random numbers are put back."""
    state = torch.get_rng_state()
    model = copy.deepcopy(model)
    if average is not None:
        model.load_state_dict(average)
    model.eval()
    totals: dict[str, Any] = {}
    for batch in loader:
        with autocast(options):
            losses, targets = losses_of(model, batch, options)
        record(totals, losses, targets or len(batch[0]), options)
    torch.set_rng_state(state)
    return {key: total / weight for key, (total, weight) in totals.items()}


def record(totals: dict[str, list[float]], losses: list[Tensor], weight: float, options: Options) -> None:
    """Add to the sums of an epoch: a mean weighs as many samples, or targets, as it is the mean over."""
    names = ["loss"] if options.networks == 1 else ["loss/a", "loss/b"]
    for name, loss in zip(names, losses, strict=True):
        total = totals.setdefault(name, [0.0, 0.0])
        total[0] += loss.item() * weight
        total[1] += weight
