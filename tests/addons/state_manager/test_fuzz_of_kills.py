"""Random tasks that are killed, interrupted and resumed: bitwise the same end, or the run has said what differs.

``pytest -m exhaustive tests/addons/state_manager/test_fuzz_of_kills.py`` makes 300 kills; a failure shows its seed and
the task. The first seeds are a part of every run.
"""

from __future__ import annotations

import logging
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults, hand
from kit.faults import ambient, everything, forked, memory_folder
from zae import Every, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon
from zae.data import SeededDataset
from zae.errors import ZaeError

SIZE, EPOCHS = 22, 3
KILLS = 300
ALWAYS = 3
"""How many of the seeds are tried in every run."""

# What a run says where its end may differ from that of a run without interruption.
SAID = re.compile(r"not exact|may differ|differs from an uninterrupted run|another one now|in_order=False|refused: ")


# --- datasets


class Augmented(Dataset[Any]):
    """Draws from the global streams, in whatever process it is read."""

    def __init__(self) -> None:
        self.samples = hand.data(SIZE)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.samples[index]
        return inputs + 0.1 * torch.rand(4) + 0.1 * random.random(), target


class ByEpoch(Augmented):
    """Another augmentation in each epoch, by a number alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.samples[index]
        return inputs + torch.randn(4, generator=torch.Generator().manual_seed(100 * self.epoch + index)), target


class Stream(IterableDataset[Any]):
    """Shuffled in a buffer, by a seed and the epoch; workers share it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        samples, order = hand.data(SIZE), [*range(first, SIZE, step)]
        random.Random(self.epoch).shuffle(order)
        yield from (samples[index] for index in order)


class Backwards(torch.utils.data.Sampler[list[int]]):
    """Batches of one's own: in a new order in each epoch, from its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE, generator=self.generator).flip(0).tolist()
        yield from (order[begin : begin + 4] for begin in range(0, SIZE, 4))


DATASETS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: hand.data(SIZE),
    "augmented": Augmented,
    "seeded": lambda: SeededDataset(Augmented(), seed=3),
    "by epoch": ByEpoch,
    "subset by epoch": lambda: Subset(ByEpoch(), range(SIZE)),
    "several": lambda: ConcatDataset([Subset(ByEpoch(), range(10)), Subset(Augmented(), range(10, SIZE))]),
    "seeded by epoch": lambda: SeededDataset(ByEpoch(), seed=3),
}
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 3.0] * 11, SIZE)},
    "subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler([*range(0, SIZE, 2), 1, 3, 5])},
    "replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(range(SIZE), replacement=True, num_samples=20)},
    "batches": lambda: {"batch_sampler": Backwards()},
    "batches of torch": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 5, False)},
}


# --- models


class Strided(nn.Module):
    """Holds a buffer, and a weight, that are not contiguous, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("scale", torch.rand(3, 6).t()[:, 0])
        self.register_buffer("mean", torch.zeros(4, 6).t())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs @ self.weight * self.scale
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0)[:, None].expand(6, 4), 0.1)
        return hidden - self.mean[:, 0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def frozen() -> nn.Module:
    model = hand.network()
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norm and dropout": hand.network,
    "frozen": frozen,
    "strided": lambda: nn.Sequential(Strided(), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)),
    "tied": Tied,
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), _Last(nn.GRU(2, 5, batch_first=True)), nn.Linear(5, 2)),
    "spectral": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 2)),
}


class _Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(inputs)[0][:, -1]
        return found


# --- optimizers and schedulers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
schedules = torch.optim.lr_scheduler
SCHEDULERS: dict[str, tuple[Any, bool]] = {
    "none": (None, False),
    "StepLR": (lambda o: schedules.StepLR(o, 2, 0.7), False),
    "exponential": (lambda o: schedules.ExponentialLR(o, 0.95), True),
    "one cycle": (lambda o: schedules.OneCycleLR(o, 0.05, total_steps=40, cycle_momentum=False), True),
    "warm restarts": (lambda o: schedules.CosineAnnealingWarmRestarts(o, 5), True),
    "lambda": (lambda o: schedules.LambdaLR(o, lambda step: 0.9**step), True),
    "cyclic": (lambda o: schedules.CyclicLR(o, 0.001, 0.05, step_size_up=4, cycle_momentum=False), True),
    "plateau": (lambda o: schedules.ReduceLROnPlateau(o, patience=0), False),
    "sequence": (
        lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 20)], milestones=[4]
        ),
        True,
    ),
    "chain": (lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.97)]),
              True),
}  # fmt: skip


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


class Failing(Task):
    """Ends its process, or raises, within a step or after the save that follows it."""

    end_at, end_how = -1, ""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step + 1 == self.end_at:
            if self.end_how == "kill in the step":
                signal.raise_signal(signal.SIGKILL)
            if self.end_how == "exception":
                raise RuntimeError("this process is to end")
            if self.end_how in ("SIGTERM", "SIGINT"):
                signal.raise_signal(getattr(signal, self.end_how))
        return super().train_step(batch)

    def checkpoint(self) -> None:
        super().checkpoint()
        if self.progress_checker.step == self.end_at and self.end_how == "kill after the step":
            signal.raise_signal(signal.SIGKILL)


# --- one case

ENDS = ("kill in the step", "kill after the step", "exception", "max_steps", "SIGTERM", "SIGINT", "disk", "torn")


@dataclass
class Case:
    """A task, and how it is interrupted; all of it follows from the seed."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.kind = draw.choice(["loader"] * 6 + ["stateful", "stream", "list"])
        self.dataset, self.sampler = draw.choice([*DATASETS]), draw.choice([*SAMPLERS])
        self.workers = draw.choice([0, 0, 0, 1, 2])
        self.persists = self.workers > 0 and draw.random() < 0.4
        self.model, self.optimizer = draw.choice([*MODELS]), draw.choice([*OPTIMIZERS])
        self.scheduler = draw.choice([*SCHEDULERS])
        self.accumulates, self.averages = draw.random() < 0.25, draw.random() < 0.3
        self.precision = draw.choice(["fp32"] * 4 + ["bf16", "fp16"])
        self.groups = draw.random() < 0.3
        self.validates = self.scheduler == "plateau" or draw.random() < 0.5
        self.save_every = draw.choice([Every(steps=1), Every(steps=2), Every(steps=3), Every(epochs=1)])
        self.clips, self.saves_async = draw.random() < 0.3, draw.random() < 0.2
        hows = [
            "kill in the step",
            "kill after the step",
            "exception",
            "max_steps",
            "SIGTERM",
            "SIGINT",
            "disk",
            "torn",
        ]
        self.ends = [
            (draw.choice(hows), draw.randint(1, 14), draw.randint(5, 120)) for _ in range(draw.choice([1, 1, 2]))
        ]

    def loader(self) -> Any:
        options = {"num_workers": self.workers, "persistent_workers": self.persists}
        if self.kind == "list":
            return [*hand.loader(SIZE, shuffle=False)]
        if self.kind == "stream":
            return DataLoader(Stream(), 4, **options)
        made = DATASETS[self.dataset]()
        return (StatefulDataLoader if self.kind == "stateful" else DataLoader)(
            made, **SAMPLERS[self.sampler](), **options
        )

    def run(self, folder: Path, how: str = "", at: int = -1) -> Any:
        """Train in this process, which may end; return what the run ended with. What it says is in a file."""
        said = logging.FileHandler(f"{folder}.log", encoding="utf-8")
        said.setLevel(logging.WARNING)
        logging.getLogger("zae").addHandler(said)
        ambient(at + 50)
        torch.manual_seed(1)
        model = MODELS[self.model]()
        trained = [each for each in model.parameters() if each.requires_grad]
        half = len(trained) // 2
        groups: Any = [{"params": trained[:half]}, {"params": trained[half:], "weight_decay": 0.05}]
        try:
            optimizer = OPTIMIZERS[self.optimizer](groups if self.groups else trained)
        except (TypeError, ValueError):
            optimizer = OPTIMIZERS[self.optimizer](trained)
        schedule, on_batch = SCHEDULERS[self.scheduler]
        add_ons: list[Any] = [StateManagerAddon]
        options: dict[str, Any] = {"gradient_clip": 1.0 if self.clips else 0.0, "save_async": self.saves_async}
        if self.accumulates:
            add_ons.append(GradientAccumulationAddon)
            options["gradient_accumulation_steps"] = 2
        if self.averages:
            add_ons.append(EMAAddon)
            options["decay"] = 0.8
        if self.precision != "fp32":
            add_ons.append(AMPAddon)
            options["precision"] = self.precision
        trainer = Failing.add_on(*add_ons)(
            model, "cpu", optimizer=optimizer, scheduler=None if schedule is None else schedule(optimizer),
            scheduler_step_on_batch=on_batch, seed=7, log_bar=False, save_path=folder, save_every=self.save_every,
            resume="auto", **options,
        )  # fmt: skip
        trainer.end_at, trainer.end_how = at, how
        valid = hand.loader(10, shuffle=False) if self.validates else None
        try:
            trainer.run(EPOCHS, self.loader(), valid, max_steps=at if how == "max_steps" else None)
        except ZaeError as error:
            logging.getLogger("zae").warning("refused: %s", error)
            return {}
        found = everything(trainer)
        return {key: value for key, value in found.items() if key != "position"}

    def begin(self, folder: Path, how: str, at: int, operation: int) -> None:
        """Begin, or continue, and end somewhere."""
        if how in ("disk", "torn"):
            with faults.installed(faults.KillingDisk(operation, torn=how == "torn")):
                self.run(folder)
        else:
            self.run(folder, how, at)


def check(seed: int) -> None:
    case = Case(seed)
    folder = memory_folder()
    try:
        whole = forked(case.run, folder / "whole")
        assert whole.status == 0, f"{case}, {vars(case)}: {whole.error}"
        straight = whole.result
        if not straight:  # Refused before it trained.
            return
        for how, at, operation in case.ends:
            forked(case.begin, folder / "run", how, at, operation)
        last = forked(case.run, folder / "run")
        assert last.status == 0, f"{case}, {vars(case)}: {last.error}"
        differing = [key for key in straight if last.result.get(key) != straight[key]]
        said = Path(f"{folder / 'run'}.log").read_text(encoding="utf-8")  # By each of the processes.
        has_said = SAID.search(said) is not None
        assert not differing or has_said, f"{differing} differ, {vars(case)}: {said}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "seed", [each if each < ALWAYS else pytest.param(each, marks=pytest.mark.exhaustive) for each in range(KILLS)]
)
def test_a_resumed_run_ends_as_it_would_have_or_says_so(seed: int) -> None:
    check(seed)
