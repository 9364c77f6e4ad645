"""Loaders of which a place in the epoch does not say what was used: a resume there is refused, never guessed."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from kit.hand import digest
from zae import Every, Trainer
from zae.addons import StateManagerAddon
from zae.data import SeededDataset
from zae.errors import CheckpointMismatch, LoaderError

SIZE = 24


class Slow(Dataset[Any]):
    """Its first sample takes longer than all others together."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            time.sleep(0.3)
        return torch.tensor([float(index)])


class SlowStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SIZE, step):
            time.sleep(0.1 if index == 0 else 0)
            yield torch.tensor([float(index)])


class Seen(Trainer):
    seen: list[int]
    unsaved_attributes = ("seen",)  # Of each process by itself.

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.seen.extend(int(each) for each in batch[:, 0])
        return {"loss": self.model(batch / SIZE).square().mean()}

    test_step = train_step


def make(folder: Path, **options: Any) -> Any:
    known: dict[str, Any] = {"save_every": Every(steps=1), "resume": "auto", "seed": 0, "log_bar": False, **options}
    trainer = Seen.add_on(StateManagerAddon)(
        lambda: torch.nn.Linear(1, 1), "cpu", optimizer=torch.optim.SGD, save_path=folder, **known
    )
    trainer.seen = []
    return trainer


def unordered(kind: Any = DataLoader, dataset: Any = None, **options: Any) -> Any:
    return kind(dataset or Slow(), **{"batch_size": 2, "num_workers": 2, "in_order": False, **options})


LOADERS: dict[str, Callable[[], Any]] = {
    "plain": unordered,
    "persistent": lambda: unordered(persistent_workers=True),
    "seeded": lambda: unordered(dataset=SeededDataset(Slow(), seed=1)),
    "stream": lambda: unordered(dataset=SlowStream()),
    "with its own state": lambda: unordered(StatefulDataLoader),
}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", list(LOADERS))
def test_an_epoch_in_no_order_is_not_resumed_within(name: str, tmp_path: Path, caplog: Any) -> None:
    """The run says so as it begins; it is refused before it trains, and at the end of an epoch it resumes."""
    first = make(tmp_path)
    first.run(2, LOADERS[name](), max_steps=4)
    assert "in_order=False and num_workers=2" in caplog.text
    resumed = make(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"in_order=False.*mid_epoch='restart'"):
        resumed.run(2, LOADERS[name]())
    assert resumed.seen == []
    with pytest.raises(CheckpointMismatch, match="in_order=False"):  # Nor in an order that is known from here on.
        make(tmp_path).run(2, unordered(in_order=True) if name in ("plain", "persistent") else LOADERS[name]())
    again = make(tmp_path, mid_epoch="restart")
    again.run(2, LOADERS[name]())
    assert sorted(again.seen) == sorted([*range(SIZE)] * 2)


def test_at_the_end_of_an_epoch_it_resumes(tmp_path: Path) -> None:
    options = {"save_every": Every(epochs=1)}
    make(tmp_path, **options).run(1, unordered())
    resumed = make(tmp_path, **options)
    resumed.run(2, unordered())
    assert sorted(resumed.seen) == [*range(SIZE)]


def test_the_same_process_does_not_continue_such_an_epoch_either() -> None:
    trainer = Seen(torch.nn.Linear(1, 1), "cpu", optimizer=torch.optim.SGD, log_bar=False)
    trainer.seen, loader = [], unordered()
    trainer.run(1, loader, max_steps=4)
    with pytest.raises(LoaderError, match=r"an epoch is open, and .*in_order=True"):
        trainer.run(1, loader)
    trainer.seen = []
    trainer.run(1, unordered())  # Another loader begins the next epoch.
    assert sorted(trainer.seen) == [*range(SIZE)]


@pytest.mark.parametrize("workers", [0, 1])
def test_up_to_one_worker_the_order_is_known(workers: int, tmp_path: Path, caplog: Any) -> None:
    seen = []
    for limit in (4, None):
        trainer = make(tmp_path)
        trainer.run(2, unordered(num_workers=workers), max_steps=limit)
        seen += trainer.seen
    assert seen == [*range(SIZE)] * 2
    assert "in_order" not in caplog.text


# --- loaders that are read again


class ShuffleBuffer(IterableDataset[Any]):
    """A buffer as in webdataset, whose generator nobody seeds."""

    def __init__(self, make_stream: Callable[[], Any]) -> None:
        self.make_stream = make_stream

    def __iter__(self) -> Iterator[Any]:
        stream, held = self.make_stream(), [*range(SIZE)]
        while held:
            yield torch.tensor([float(held.pop(int(stream.random() * len(held))))])


_reads = itertools.count(1)


class Counting(IterableDataset[Any]):
    """Another order each time it is read, by a number that no state has."""

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(next(_reads)).sample(range(SIZE), SIZE)
        yield from (torch.tensor([float(each)]) for each in order)


class Queue:
    """Batches that something else has put there, each of them once."""

    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SIZE // 2):
            yield self.waiting.get()


def filled() -> Queue:
    loader = Queue()
    for index in range(0, 3 * SIZE, 2):
        loader.waiting.put(torch.tensor([[float(index)], [index + 1.0]]))
    return loader


OTHERS: dict[str, Callable[[], Any]] = {
    "random": lambda: DataLoader(ShuffleBuffer(random.Random), 2),
    "numpy": lambda: DataLoader(ShuffleBuffer(np.random.default_rng), 2),
    "in workers": lambda: DataLoader(ShuffleBuffer(random.SystemRandom), 2, num_workers=1),
    "counting": lambda: DataLoader(Counting(), 2),
    "queue": filled,
}
AT = {"counting": SIZE // 2 + 5}  # In the second epoch.


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", list(OTHERS))
def test_a_stream_that_is_another_one_now_is_refused(name: str, tmp_path: Path) -> None:
    """By what was used last: the batches before are not held, and the same one is at the same place by chance."""
    make(tmp_path).run(2, OTHERS[name](), max_steps=AT.get(name, 5))
    resumed = make(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"yields other batches when it is read again.*mid_epoch='restart'"):
        resumed.run(2, OTHERS[name]())
    assert resumed.seen == []
    again = make(tmp_path, mid_epoch="restart")
    again.run(2, OTHERS[name]())
    assert len(again.seen) >= SIZE


class Changing(Seen):
    """Writes to its batch, as a step may."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        numbers = batch.pop("numbers").div_(SIZE)
        return {"loss": self.model(numbers).square().mean()}


class Reading(Seen):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch["numbers"] / SIZE).square().mean()}


class Dicts:
    """A loader of one's own, with texts and shapes that differ."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(0, SIZE, 2):
            numbers = torch.tensor([[float(index)], [index + 1.0]])
            yield {"numbers": numbers, "names": [f"a{index}", "b"], "other": (np.ones(index), None)}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("task", [Reading, Changing])
@pytest.mark.parametrize("at", [1, 5, 12, 17])
def test_a_stream_that_is_the_same_is_resumed(task: Any, at: int, tmp_path: Path) -> None:
    def train(folder: Path, *limits: int | None) -> Any:
        for limit in limits:
            trainer = task.add_on(StateManagerAddon)(
                lambda: torch.nn.Linear(1, 1), "cpu", optimizer=torch.optim.AdamW, save_path=folder, seed=0,
                save_every=Every(steps=1), resume="auto", log_bar=False,
            )  # fmt: skip
            trainer.run(2, Dicts(), max_steps=limit)
        return digest(trainer.unwrap())

    assert train(tmp_path / "a", None) == train(tmp_path / "b", at, None)
