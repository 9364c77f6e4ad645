"""Killed after any update and resumed in a process with other random streams: bitwise the run that was never killed."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults, hand
from kit.faults import KillAddon, answer, everything, forked
from kit.loggers import lines
from zae import Every, Trainer
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    StateManagerAddon,
)
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon
from zae.errors import CheckpointMismatch

EPOCHS = 3


class Adversaries(Trainer):
    """Two optimizers, one loss each, on one network."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        return {"loss": {"body": loss, "head": loss * (1 + 0.1 * random.random())}}

    def test_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}


class Case:
    """One way to train: the class, its options, its loader; and a kill in each of its lives.

    An epoch has two or three updates, so that there is a first one, one in the middle, and a last one.
    """

    def __init__(self, add_ons: list[type] = [], workers: int = 0, two: bool = False, **options: Any) -> None:  # noqa: B006
        self.add_ons, self.workers, self.two, self.options = add_ons, workers, two, options

    def loader(self) -> Any:
        window = GradientAccumulationAddon in self.add_ons
        return hand.loader(batch_size=4 if window else 8, num_workers=self.workers)

    def build(self, folder: Path, **more: Any) -> Any:
        """A trainer that resumes by itself."""
        model = faults.classifier()
        options: dict[str, Any] = {"save_path": folder / "run", "save_every": 1, "resume": "auto", "log_bar": False}
        options |= {"gradient_clip": 0.5, "scheduler_step_on_batch": True, **self.options, **more}
        if JSONLLoggerAddon in self.add_ons:
            options |= {"jsonl_path": folder / "log.jsonl", "log_every": 1}
        if self.two:
            parts = list(model.children())
            body, head = nn.ModuleList(parts[:-1]).parameters(), parts[-1].parameters()
            optimizer: Any = {"body": torch.optim.AdamW(body, lr=0.01), "head": torch.optim.SGD(head, 0.1, 0.9)}
            scheduler: Any = {k: torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for k, o in optimizer.items()}
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=18)
        cls = (Adversaries if self.two else faults.Task).add_on(StateManagerAddon, KillAddon, *self.add_ons)
        return cls(model, "cpu", optimizer=optimizer, scheduler=scheduler, seed=7, **options)

    def run(self, folder: Path, seed: int, **more: Any) -> Any:
        """Train to the end of the third epoch, in this process."""
        faults.ambient(seed)
        trainer = self.build(folder, **more)
        trainer.run(EPOCHS, self.loader(), hand.loader(9, 4, seed=8, shuffle=False), valid_every=Every(epochs=1))
        rows = lines(folder / "log.jsonl") if JSONLLoggerAddon in self.add_ons else []
        return {**everything(trainer), "steps": trainer.progress_checker.step, "lines": rows}


CASES = {
    "plain": Case(),
    "workers": Case(workers=2),
    "all": Case(
        [AMPAddon, EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon, GradientAccumulationAddon],
        precision="bf16", decay=0.9, patience=2, gradient_accumulation_steps=2,
    ),
    "fp16": Case([AMPAddon, EMAAddon], precision="fp16", loss_scale=(2.0**22, 1.0), decay=0.9),
    "two optimizers": Case([GradientAccumulationAddon, JSONLLoggerAddon], two=True, gradient_accumulation_steps=4),
    "every second step": Case([JSONLLoggerAddon], save_every=2, keep_last=1, keep_best=0),
    "in the background": Case([JSONLLoggerAddon, EMAAddon], decay=0.9, save_async=True),
}  # fmt: skip


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("name", list(CASES))
def test_killed_after_every_update(folder: Path, name: str) -> None:
    """One life for each update, each killed after it; the end is bitwise the same."""
    case = CASES[name]
    whole = answer(case.run, folder / "whole", 1)
    for step in range(1, whole["steps"] + 1):
        outcome = forked(lambda step=step: case.run(folder, 100 + step, kill_at=step) and None)
        assert outcome.status == -signal.SIGKILL, outcome.error
    ended = answer(case.run, folder, 999)
    assert ended == whole
    if ended["lines"]:
        assert [line["step"] for line in ended["lines"] if "train/noise" in line or "train/loss/body" in line] == list(
            range(1, whole["steps"] + 1)
        ), "each step exactly once"


@pytest.fixture(scope="module")
def plain_end(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the plain case ends with that is not killed."""
    return answer(CASES["plain"].run, tmp_path_factory.mktemp("whole"), 1)


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("step", range(1, 10))
def test_one_kill_at_each_update(folder: Path, plain_end: Any, step: int) -> None:
    """A run that is killed once only, after update k, for each k."""
    case = CASES["plain"]
    assert plain_end["steps"] == 9
    assert forked(lambda: case.run(folder, 50, kill_at=step) and None).status == -signal.SIGKILL
    assert answer(case.run, folder, 60 + step) == plain_end


class Asked(Dataset[Any]):
    """Counts what this process asks for; augments with all three global streams."""

    unsaved_attributes = ("asked",)

    def __init__(self, path: Path | None = None) -> None:
        self.data, self.path, self.asked = hand.data(), path, []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn(4) + random.random() * 0.1 + float(np.random.rand()) * 0.1, target


class OwnStreams(Asked):
    """Augments with streams of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.old, self.plain = np.random.default_rng(3), np.random.RandomState(4), random.Random(5)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        inputs, target = self.data[index]
        return inputs + float(self.rng.normal() + self.old.rand() + self.plain.random()) * 0.1, target


class OwnOrder(Sampler[int]):
    """A new order each epoch, from its own stream that continues from epoch to epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, np.random.default_rng(11)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(self.size).tolist())

    def __len__(self) -> int:
        return self.size


class Cursor(OwnOrder):
    """A sampler with its own state."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch, self.rng = 0, None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(self.size).tolist())

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Lazy(OwnOrder):
    """Draws each sample from the global stream, as it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.size))
        while left:
            yield left.pop(random.randrange(len(left)))


class Stream(IterableDataset[Any]):
    """The same samples each time, without a state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(hand.data())


_straight: dict[Any, Any] = {}  # What a loader's run ends with that is not killed.


def straight_and_resumed(folder: Path, loader: Callable[[], Any], at: int, **options: Any) -> tuple[Any, Any, Any]:
    """Train three epochs; then the same killed after a step, and resumed with the loader that is returned last."""

    def run(place: Path, loader: Any, **more: Any) -> Any:
        model = faults.classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        made = faults.Task.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=optimizer, save_path=place, save_every=at, resume="auto", seed=7, log_bar=False,
            **options, **more,
        )  # fmt: skip
        made.run(EPOCHS, loader)
        return everything(made)

    if (loader, *options.items()) not in _straight:
        faults.ambient(1)
        _straight[loader, *options.items()] = run(folder / "whole", loader())
    whole = _straight[loader, *options.items()]

    def killed() -> None:
        faults.ambient(1)
        run(folder / "run", loader(), kill_at=at)

    assert forked(killed).status == -signal.SIGKILL
    faults.ambient(2)
    again = loader()
    return whole, run(folder / "run", again), again


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("at", [1, 5, 6, 7, 12, 17])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Asked(), batch_size=4, shuffle=True),
        lambda: DataLoader(Asked(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4)),
        lambda: DataLoader(OwnStreams(), batch_size=4, shuffle=True),
        lambda: DataLoader(torch.utils.data.Subset(OwnStreams(), range(22)), batch_size=4, shuffle=True),
        lambda: DataLoader(Asked(), batch_size=4, sampler=OwnOrder(22)),
        lambda: DataLoader(Asked(), batch_size=4, sampler=Cursor(22)),
        lambda: StatefulDataLoader(Asked(), batch_size=4, shuffle=True),
        lambda: list(hand.loader(shuffle=False)),
    ],
    ids=["global", "generator", "own streams", "subset", "own order", "sampler state", "stateful loader", "list"],
)  # fmt: skip
def test_loaders(folder: Path, make: Any, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """Augmentation, generators, samplers and loaders with their own streams and states: bitwise."""
    whole, resumed, loader = straight_and_resumed(folder, make, at)
    assert resumed == whole
    dataset = getattr(loader, "dataset", None)
    asked = getattr(getattr(dataset, "dataset", dataset), "asked", None)
    if asked is not None:
        assert len(asked) == 3 * 22 - min(4 * (at % 6) + 22 * (at // 6), 66), "the consumed ones are not read"
    assert not [r for r in caplog.records if "exact" in r.getMessage()]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("at", [2, 6, 9])
def test_stateful_loader_with_workers(folder: Path, at: int) -> None:
    """StatefulDataLoader with two workers continues through its own state: the same batches."""
    make = lambda: StatefulDataLoader(hand.data(), batch_size=4, shuffle=True, num_workers=2)  # noqa: E731
    whole, resumed, _ = straight_and_resumed(folder, make, at)
    assert resumed == whole


def test_a_signal_parts_from_the_workers_of_a_stateful_loader(folder: Path) -> None:
    """What is saved after SIGTERM is the place of StatefulDataLoader at that step, not at its beginning."""

    def run(seed: int, **more: Any) -> Any:
        faults.ambient(1)
        loader = StatefulDataLoader(hand.data(), batch_size=4, shuffle=True, num_workers=2)
        faults.ambient(seed)
        model = faults.classifier()
        made = faults.Task.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), save_path=folder / str(seed // 9),
            resume="auto", seed=7, log_bar=False, **more,
        )  # fmt: skip
        made.run(2, loader)
        return everything(made)

    whole = answer(run, 1)
    for at in (2, 9):
        assert forked(lambda at=at: run(10 + at // 9, kill_at=at, kill_with=signal.SIGTERM) and None).status == 143
    assert answer(run, 12)["model"] == whole["model"]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_augment_are_told_of(folder: Path, persistent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Random numbers in the workers of a plain loader cannot be exact, and one warning says so."""
    make = lambda: DataLoader(  # noqa: E731
        Asked(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    straight_and_resumed(folder, make, 9)
    said = [r.getMessage() for r in caplog.records if "not exact" in r.getMessage()]
    assert len(said) == 1
    assert "num_workers=2" in said[0]


def test_a_lazy_sampler_is_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sampler that draws from the global stream while it is iterated: one warning names it."""
    straight_and_resumed(folder, lambda: DataLoader(hand.data(), batch_size=4, sampler=Lazy(22)), 9)
    said = [r.getMessage() for r in caplog.records if "while it is iterated" in r.getMessage()]
    assert len(said) == 1
    assert "Lazy" in said[0]


@pytest.mark.parametrize("at", [3, 6, 8])
def test_streams_are_passed_over(folder: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """An IterableDataset without a state is read again up to the place; a message says so; bitwise here."""
    whole, resumed, _ = straight_and_resumed(folder, lambda: DataLoader(Stream(), batch_size=4), at)
    assert resumed == whole
    said = [r.getMessage() for r in caplog.records if "loaded and dropped" in r.getMessage()]
    assert len(said) == 1


def once() -> Iterator[Any]:
    """Batches that cannot be read a second time."""
    yield from list(hand.loader(shuffle=False)) * 4


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), 6),
        (lambda: DataLoader(Asked(), batch_size=4, sampler=Lazy(22)), 6),
        (once, 6 * 4),
    ],
    ids=["stream", "sampler", "iterator"],
)
def test_or_the_epoch_begins_again(folder: Path, make: Any, seen: int, caplog: pytest.LogCaptureFixture) -> None:
    """With mid_epoch="restart" nothing is read again: the open epoch restarts, and a message says so."""

    def run(number: int, **more: Any) -> Any:
        model = faults.classifier()
        made = faults.Task.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), save_path=folder / "run",
            save_every=1, resume="auto", mid_epoch="restart", seed=7, log_bar=False, **more,
        )  # fmt: skip
        given: list[Any] = []
        step = made.train_step
        made.train_step = lambda batch: (given.append(batch), step(batch))[1]
        loader = make()
        made.run(number, loader, steps_per_epoch=6)
        return made.progress_checker, given, list(loader) if loader is iter(loader) else []

    assert forked(lambda: run(2, kill_at=3) and None).status == -signal.SIGKILL
    progress, given, left = run(2)
    assert (progress.epoch, progress.step, progress.batch) == (2, 3 + 12, 3 + 12)
    assert len(given) + len(left) == 12 + len(left) == 12 + (seen - 12 if left else 0)
    if not isinstance(given[0], list) or seen == 6 * 4:
        assert torch.equal(given[0][0], next(iter(make()))[0]), "nothing was passed over"
    said = [r.getMessage() for r in caplog.records if "begins again at its first batch" in r.getMessage()]
    assert len(said) == 1
    assert "the 3 batches" in said[0]


@pytest.mark.sample(count=5)
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: hand.loader(batch_size=4), "batch_size was 8 and is 4"),
        (lambda: hand.loader(26, 8), "dataset length was 22 and is 26"),
        (lambda: hand.loader(22, 8, shuffle=False), "sampler was RandomSampler and is SequentialSampler"),
        (lambda: hand.loader(22, 8, drop_last=True), "drop_last was False and is True"),
        (lambda: list(hand.loader(22, 8)), "loader was DataLoader and is list"),
    ],
)
@pytest.mark.parametrize("at", [2, 6])
def test_another_loader(folder: Path, loader: Any, message: str, at: int) -> None:
    """Batch size, length or kind of the loader has changed: both values, before the first batch."""
    case = CASES["plain"]
    assert forked(lambda: case.run(folder, 1, kill_at=at) and None).status == -signal.SIGKILL
    trainer = case.build(folder)
    with pytest.raises(CheckpointMismatch) as caught:
        trainer.run(EPOCHS, loader(), hand.loader(9, 4, seed=8, shuffle=False))
    assert message in str(caught.value)
    assert trainer.progress_checker.step == at


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("at", "order"),
    [
        *((at, lambda: {"shuffle": True}) for at in (1, 5, 6)),
        (4, lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)}),
        (8, lambda: {"sampler": OwnOrder(22)}),
    ],
)
def test_reshard_with_another_batch_size(folder: Path, order: Any, at: int) -> None:
    """Reshard=True: each sample that was left comes exactly once; killed and resharded again, too."""
    indexed = torch.utils.data.TensorDataset(hand.data()[:][0], torch.arange(22))

    class Noting(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            with open(folder / "seen", "a") as file:
                file.writelines(f"{self.progress_checker.epoch} {int(index)}\n" for index in batch[1])
            return super().train_step((batch[0], batch[1] % 2))

    def run(batch_size: int, place: str = "run", **more: Any) -> Any:
        faults.ambient(batch_size)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 2))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        made = Noting.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), seed=7, log_bar=False,
            save_path=folder / place, save_every=1, resume="auto", **more,
        )  # fmt: skip
        made.run(3, DataLoader(indexed, batch_size=batch_size, **order()))
        return everything(made)

    def seen() -> list[list[int]]:
        pairs = [tuple(map(int, line.split())) for line in (folder / "seen").read_text().splitlines()]
        return [sorted(index for epoch, index in pairs if epoch == number) for number in range(3)]

    assert forked(lambda: run(4, kill_at=at) and None).status == -signal.SIGKILL
    with pytest.raises(CheckpointMismatch, match=r"batch_size was 4 and is 3\..*its own save_path"):
        run(3)
    shutil.copytree(folder / "run", folder / "straight")
    before = (folder / "seen").read_text()
    whole = answer(lambda: run(3, "straight", reshard=True))
    assert seen() == [list(range(22))] * 3
    (folder / "seen").write_text(before)
    assert forked(lambda: run(3, kill_at=at + 1, reshard=True) and None).status == -signal.SIGKILL
    shutil.copytree(folder / "run", folder / "thrice")
    between = (folder / "seen").read_text()
    assert answer(lambda: run(3)) == whole, "what was dealt anew is resumed bitwise like anything else"
    assert seen() == [list(range(22))] * 3
    (folder / "seen").write_text(between)
    answer(lambda: run(5, "thrice", reshard=True))
    assert seen() == [list(range(22))] * 3


def test_reshard_refuses_what_has_another_order(folder: Path) -> None:
    """Another dataset, another sampler and a stream are refused with reshard=True too, with both values."""
    case = CASES["plain"]
    assert forked(lambda: case.run(folder, 1, kill_at=2) and None).status == -signal.SIGKILL
    for loader, message in (
        (hand.loader(26, 4), "dataset length was 22 and is 26"),
        (hand.loader(batch_size=4, shuffle=False), "sampler was RandomSampler and is SequentialSampler"),
        (list(hand.loader(batch_size=4)), "batch sampler was BatchSampler and is unknown"),
        (DataLoader(Stream(), batch_size=4), "has no order that can be resharded"),
    ):
        with pytest.raises(CheckpointMismatch, match=message):
            case.build(folder, reshard=True).run(EPOCHS, loader)


def test_reshard_and_a_loader_with_its_own_place(folder: Path) -> None:
    """A StatefulDataLoader is not resharded; with mid_epoch="restart" any batch size begins the epoch."""

    def run(batch_size: int, **more: Any) -> Any:
        model = faults.classifier()
        made = faults.Task.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=torch.optim.AdamW(model.parameters()), seed=7, log_bar=False,
            save_path=folder / "run", save_every=1, resume="auto", **more,
        )  # fmt: skip
        made.run(1, StatefulDataLoader(hand.data(), batch_size=batch_size, shuffle=True))
        return made.progress_checker

    assert forked(lambda: run(4, kill_at=2) and None).status == -signal.SIGKILL
    with pytest.raises(CheckpointMismatch, match="a StatefulDataLoader has its own position"):
        run(8, reshard=True)
    with pytest.raises(CheckpointMismatch, match="batch_size was 4 and is 8"):
        run(8, mid_epoch="restart")
    progress = run(8, reshard=True, mid_epoch="restart")
    assert (progress.epoch, progress.step) == (1, 2 + 3)


def resumed(script: Any, place: Path, step: int) -> Any:
    """Return the answer of a script that was killed before a step, and then started again."""
    assert forked(lambda: script(place, 1, kill_at=step) and None).status == -signal.SIGKILL
    return answer(script, place, 2)


def test_a_later_call_of_run_may_have_another_loader(folder: Path) -> None:
    """Two stages with two loaders in one script, killed in either: the second one's loader is not refused."""

    def script(place: Path, seed: int, **more: Any) -> Any:
        faults.ambient(seed)
        model = faults.classifier()
        made = faults.Task.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), seed=7, log_bar=False,
            save_path=place, save_every=1, resume="auto", **more,
        )  # fmt: skip
        made.run(1, hand.loader())
        made.run(2, hand.loader(batch_size=8, generator=torch.Generator().manual_seed(3)))
        return everything(made)

    whole = answer(script, folder / "whole", 0)
    for step in (3, 6, 7, 9, 11):
        assert resumed(script, folder / str(step), step) == whole


def test_saving_changes_nothing(folder: Path) -> None:
    """With and without saving, and with two saves at one step, training is bitwise the same."""
    case = CASES["all"]
    saved = case.run(folder / "saved", 1)
    plain = case.run(folder / "plain", 2, save_every=Every(epochs=100), keep_best=0)
    trainer = case.build(folder / "twice", save_every=Every(epochs=1))
    checkpoint = trainer.checkpoint

    def twice() -> None:
        checkpoint()
        first = trainer.save_state()
        assert trainer.save_state() == first

    trainer.checkpoint = twice
    trainer.run(EPOCHS, case.loader(), hand.loader(9, 4, seed=8, shuffle=False))
    ends = [saved, plain, everything(trainer)]
    assert all(end["model"] == saved["model"] and end["optimizer"] == saved["optimizer"] for end in ends)


class Worse(faults.Task):
    """A validation that gets worse from the third epoch on."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        epoch = self.progress_checker.epoch
        return {"loss": abs(epoch - 2.0)}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("epoch", range(1, 6))
def test_early_stopping_counts_on(folder: Path, epoch: int) -> None:
    """Killed at the end of each epoch, it stops at the same update; and a run that was stopped stays stopped."""

    def run(place: Path, **more: Any) -> Any:
        model = faults.classifier()
        made = Worse.add_on(StateManagerAddon, EarlyStoppingAddon, KillAddon)(
            model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), save_path=place, resume="auto",
            patience=3, seed=7, log_bar=False, **more,
        )  # fmt: skip
        metrics = made.run(20, hand.loader(), [hand.data()[:4]])
        return metrics["epoch"], metrics["step"], metrics["stop_reason"], everything(made)

    whole = answer(run, folder / "whole")
    assert whole[:2] == (5, 30)
    killed = forked(lambda: run(folder / "run", kill_at=6 * epoch) and None)
    assert killed.status == -signal.SIGKILL
    assert answer(run, folder / "run") == whole
    assert answer(run, folder / "run") == whole, "it was stopped, and does not train again"


class AtTheEnd(KillAddon):
    """Notes which epochs have ended."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        with (self.save_path.parent / "ends").open("a") as file:
            file.write(f"{self.progress_checker.epoch} ")


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ((4, 8), {"n_epoch": 3, "steps_per_epoch": 4}),
        ((6, 12), {"n_epoch": None, "max_steps": 12}),
        ((12,), {"n_epoch": None, "max_steps": 12, "steps_per_epoch": 4}),
        ((24,), {"n_epoch": 9, "valid_every": 6}),
    ],
    ids=["so many steps", "max_steps", "both", "stopped early"],
)
def test_killed_after_the_last_step_of_an_epoch(folder: Path, kills: Any, options: Any) -> None:
    """The epoch that is open in the state, with all of its steps, is closed, also where the run ends."""

    def run(place: Path, seed: int, **more: Any) -> Any:
        place.mkdir(exist_ok=True)
        faults.ambient(seed)
        model = faults.classifier()
        made = Worse.add_on(StateManagerAddon, EarlyStoppingAddon, AtTheEnd)(
            model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), save_path=place / "run",
            save_every=1, resume="auto", patience=1, seed=7, log_bar=False, **more,
        )  # fmt: skip
        loader = DataLoader(Asked(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4))
        valid = [hand.data()[:4]] if "valid_every" in options else None
        metrics = made.run(loader=loader, valid_loader=valid, **options)
        return metrics["epoch"], metrics["stop_reason"], everything(made), (place / "ends").read_text()

    whole = answer(run, folder / "whole", 1)
    assert whole[3].split() == [str(epoch) for epoch in range(1, whole[0] + 1)]
    for step in kills:
        assert forked(lambda step=step: run(folder / "one", 2, kill_at=step) and None).status == -signal.SIGKILL
    assert answer(run, folder / "one", 3) == whole
    assert answer(run, folder / "one", 4) == whole, "it has ended, and does not train again"


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_training_weights_and_the_score_of_the_moment(folder: Path, order: tuple[int, ...]) -> None:
    """For every order of the add-ons, the model file holds the training weights, with that validation's score."""
    add_ons = [StateManagerAddon, EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon]
    model = faults.classifier()
    seen: dict[int, Any] = {}

    class Watching(faults.Task):
        def checkpoint(self) -> None:
            seen[self.progress_checker.step] = (faults.fingerprint(dict(self.model_state())), dict(self.test_metrics))
            super().checkpoint()

    made = Watching.add_on(*(add_ons[index] for index in order))(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=folder / "run", decay=0.5,
        patience=9, jsonl_path=folder / "log.jsonl", keep_last=None, log_bar=False, seed=3,
    )  # fmt: skip
    made.run(2, hand.loader(), hand.loader(9, 4, seed=8, shuffle=False))
    from zae.checkpoint.folder import list_checkpoints
    from zae.checkpoint.reader import load_checkpoint

    for path in list_checkpoints(folder / "run"):
        manifest, weights, _ = load_checkpoint(path)
        assert faults.fingerprint(dict(weights)) == seen[manifest["step"]][0]
        assert manifest["info"]["score"] == seen[manifest["step"]][1]["loss"]
    assert faults.fingerprint(dict(weights)) != faults.fingerprint(made.average)


def test_plain_torch_reads_a_tied_model(folder: Path) -> None:
    """A run with tied weights saves in both formats, resumes tied, and reads without pickle."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.head = nn.Linear(4, 2)

        def forward(self, inputs: Any) -> Any:
            return self.head(self.two(self.one(inputs)))

    for kind in ("safetensors", "ckpt"):

        def run(steps: int, kind: str = kind) -> Any:
            torch.manual_seed(0)
            model = Tied()
            made = faults.Task.add_on(StateManagerAddon)(
                model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), save_path=folder / kind,
                save_format=kind, save_every=1, resume="auto", log_bar=False, seed=3,
            )  # fmt: skip
            made.run(None, hand.loader(), max_steps=steps)
            return made

        run(3)
        made = run(5)
        model = made.unwrap()
        assert model.one.weight.data_ptr() == model.two.weight.data_ptr()
        file = next((made.last_path).glob("model.*"))
        if kind == "ckpt":
            weights = torch.load(file, weights_only=True)
            assert torch.equal(weights["one.weight"], model.one.weight)


def test_a_script_that_calls_run_twice(folder: Path) -> None:
    """`run(1); run(2)` killed anywhere finds its goal again in a new process."""

    def script(place: Path, seed: int, **more: Any) -> Any:
        faults.ambient(seed)
        made = CASES["plain"].build(place, **more)
        loader = hand.loader()
        made.run(1, loader)
        made.run(2, loader)
        return everything(made)

    whole = answer(script, folder / "whole", 0)
    for step in (2, 6, 10, 12, 18):
        assert resumed(script, folder / str(step), step) == whole


def test_validation_by_steps_and_max_steps(folder: Path) -> None:
    """Validation in the middle of epochs, max_steps inside of one, `last_path` the newest: the same end."""

    def script(place: Path, seed: int, **more: Any) -> Any:
        faults.ambient(seed)
        made = CASES["plain"].build(place, **more)
        made.run(None, hand.loader(), hand.loader(9, 4, seed=8), max_steps=16, valid_every=4)
        return {**everything(made), "history": made.valid_history and len(made.valid_history)}

    whole = answer(script, folder / "whole", 0)
    for step in (3, 4, 5, 8, 15, 16):
        assert resumed(script, folder / str(step), step) == whole
    assert os.path.isdir(folder / "16" / "run" / "step-00000016")


def test_a_state_that_does_not_fit_changes_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another model or other optimizer groups are refused before anything is loaded."""
    caplog.set_level(logging.INFO, "zae")
    answer(CASES["plain"].run, folder, 1)
    wide = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 2))
    model = faults.classifier()
    groups = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
    double = faults.classifier().double()
    for network, optimizer, message in (
        (wide, torch.optim.AdamW(wide.parameters()), "of another shape"),
        (model, torch.optim.AdamW(groups), r"parameter groups of \[2, 4\]"),
        (model, torch.optim.SGD(model.parameters(), lr=0.1), "optimizer 0 was saved by AdamW, and is SGD here"),
        (double, torch.optim.AdamW(double.parameters()), r"0\.weight was torch.float32 and is torch.float64"),
    ):
        made = faults.Task.add_on(StateManagerAddon)(
            network, "cpu", optimizer=optimizer, save_path=folder / "run", log_bar=False,
            scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=18),
        )  # fmt: skip
        made.setup()
        before = everything(made)
        with pytest.raises(CheckpointMismatch, match=message):
            made.load_state()
        assert everything(made) == before


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("between", ["restore_best", "apply_weights"])
def test_what_a_script_does_between_two_calls_of_run(folder: Path, between: str) -> None:
    """Killed in the second call of run, it restores the best of the first again: not upon the state."""

    def script(place: Path, seed: int, **more: Any) -> Any:
        faults.ambient(seed)
        made = CASES["plain"].build(place, scheduler_step_on_batch=False, **more)
        made.scheduler = None
        loader, valid = hand.loader(), hand.loader(9, 4, seed=8, shuffle=False)
        made.evaluate(valid)
        made.run(2, loader, valid)
        if between == "restore_best":
            made.restore_best()
        else:
            made.apply_weights({name: torch.zeros_like(value) for name, value in made.model_state().items()})
        weights = hand.digest(made.unwrap())
        made.evaluate(valid)
        made.run(1, loader, valid)
        made.run(1, loader, valid)
        return everything(made), weights

    whole, weights = answer(script, folder / "whole", 0)
    for step in (7, 13, 19):
        end, again = resumed(script, folder / str(step), step)
        assert end == whole, step
        assert again == weights or (between == "restore_best" and step > 12), "in between it is what the script says"
