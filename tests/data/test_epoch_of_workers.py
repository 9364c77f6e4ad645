"""The epoch of a dataset in workers that persist: it reaches them, or the run is refused before it trains."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from kit.ranks import on_ranks
from zae import Every, Trainer
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.data import SeededDataset
from zae.errors import LoaderError

SIZE = 8


class ByEpoch(Dataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.epoch)])


class WithData(ByEpoch):
    """Its samples are in shared memory, and its epoch is not."""

    def __init__(self) -> None:
        self.samples = torch.zeros(SIZE, 4).share_memory_()


class InTensor(ByEpoch):
    def __init__(self) -> None:
        self.held: Any = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.held.fill_(epoch)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.held)])


class InValue(InTensor):
    def __init__(self) -> None:
        self.state = {"epoch": multiprocessing.Value("i", 0)}

    def set_epoch(self, epoch: int) -> None:
        self.state["epoch"].value = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.state["epoch"].value)])


class Around(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class Stream(IterableDataset[Any]):
    epoch = 0
    is_sharded = True

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        parts = 1 if info is None else info.num_workers
        yield from (torch.tensor([float(self.epoch)]) for _ in range(SIZE // parts))


class Seen(Trainer):
    seen: list[int]
    unsaved_attributes = ("seen",)  # Of each process by itself.

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.seen.append(int(batch[0, 0]))
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def make(*add_ons: Any, **options: Any) -> Any:
    trainer = Seen.add_on(*add_ons)(
        lambda: torch.nn.Linear(1, 1), "cpu", optimizer=torch.optim.SGD, log_bar=False, seed=0, **options
    )
    trainer.seen = []
    return trainer


def loader(dataset: Any, kind: Any = DataLoader, **options: Any) -> Any:
    return kind(dataset, **{"batch_size": 4, "num_workers": 1, "persistent_workers": True, **options})


STALE: dict[str, Callable[[], Any]] = {
    "plain": ByEpoch,
    "with shared data": WithData,
    "Subset": lambda: Subset(ByEpoch(), range(SIZE)),
    "ConcatDataset": lambda: ConcatDataset([InTensor(), ByEpoch()]),
    "within another": lambda: Around(Subset(ByEpoch(), range(SIZE))),
    "stream": Stream,
}


@pytest.mark.sample(count=4)
@pytest.mark.parametrize("name", list(STALE))
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_an_epoch_that_does_not_reach_the_workers_is_refused(name: str, kind: Any) -> None:
    trainer = make()
    with pytest.raises(LoaderError, match=r"\((ByEpoch|WithData|Stream)\) has set_epoch.*persistent_workers=False"):
        trainer.run(3, loader(STALE[name](), kind))
    assert trainer.seen == []
    for options in ({"persistent_workers": False}, {"persistent_workers": False, "num_workers": 0}):
        trainer = make()
        trainer.run(3, loader(STALE[name](), kind, **options))
        assert [*dict.fromkeys(trainer.seen)] == [0, 1, 2]


def test_one_epoch_is_trained_and_the_next_one_refused() -> None:
    """In one call of run, in several, and with epochs by hand."""
    data = loader(ByEpoch())
    trainer = make()
    trainer.run(1, data)
    assert trainer.seen == [0, 0]
    with pytest.raises(LoaderError, match="persistent_workers"):
        trainer.run(1, data)
    trainer, data = make(), loader(ByEpoch())
    with trainer.ready():
        trainer.run_epoch(data)
        with pytest.raises(LoaderError, match="persistent_workers"):
            trainer.run_epoch(data)
    assert trainer.seen == [0, 0]


SHARED: dict[str, Callable[[], Any]] = {
    "a tensor": InTensor,
    "a value": InValue,
    "within another": lambda: Around(Subset(InTensor(), range(SIZE))),
    "SeededDataset": lambda: SeededDataset(ByEpoch()),
    "SeededDataset around others": lambda: SeededDataset(Around(Subset(ByEpoch(), range(SIZE)))),
    "Subset of a SeededDataset": lambda: Subset(SeededDataset(ByEpoch()), range(SIZE)),
}


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("name", list(SHARED))
def test_an_epoch_that_workers_see_is_trained_and_resumes(name: str, tmp_path: Path) -> None:
    straight = make()
    straight.run(3, loader(SHARED[name]()))
    assert straight.seen == [0, 0, 1, 1, 2, 2]
    seen = []
    for limit in (3, None):
        trainer = make(StateManagerAddon, save_path=tmp_path, save_every=Every(steps=1), resume="auto")
        trainer.run(3, loader(SHARED[name]()), max_steps=limit)
        seen += trainer.seen
    assert seen == straight.seen
    assert torch.equal(trainer.unwrap().weight, straight.unwrap().weight)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resume_is_in_the_epoch_that_its_trainer_counts(kind: Any, stop: int, tmp_path: Path) -> None:
    """Within an epoch, and as the next one begins."""
    seen: list[float] = []
    for epochs, limit in ((3, stop), (2, None), (3, None)):
        trainer = make(StateManagerAddon, save_path=tmp_path, save_every=Every(steps=1), resume="auto")
        data = loader(ByEpoch(), kind, num_workers=0, persistent_workers=False)
        trainer.run(epochs, data, max_steps=limit)
        seen += trainer.seen
    assert seen == [0, 0, 1, 1, 2, 2]


def test_a_stream_of_hugging_face_shares_its_epoch() -> None:
    rows = datasets.Dataset.from_dict({"x": [float(each) for each in range(SIZE)]}).to_iterable_dataset()
    orders: list[list[float]] = []

    class Rows(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            orders.append(batch["x"].tolist())
            return {"loss": self.model(batch["x"].float()[:, None]).square().mean()}

        test_step = train_step

    trainer = Rows(torch.nn.Linear(1, 1), "cpu", optimizer=torch.optim.SGD, log_bar=False)
    trainer.run(2, loader(rows.shuffle(seed=1).with_format("torch"), batch_size=SIZE))
    assert orders[0] != orders[1]


def test_workers_from_earlier_epochs_are_told_of(tmp_path: Path, caplog: Any) -> None:
    """What a plain dataset draws in workers that persist is not exact after an epoch either."""

    class Noisy(ByEpoch):
        set_epoch: Any = None

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1)

    for epochs in (1, 2):
        trainer = make(StateManagerAddon, save_path=tmp_path, resume="auto")
        trainer.run(epochs, loader(Noisy()))
    assert "resuming with persistent_workers=True" in caplog.text
    caplog.clear()
    for epochs in (1, 2):
        trainer = make(StateManagerAddon, save_path=tmp_path / "seeded", resume="auto")
        trainer.run(epochs, loader(SeededDataset(Noisy())))
    assert "persistent_workers" not in caplog.text


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "Subset", "stream", "shared"])
def test_on_ranks(world: int, kind: str) -> None:
    trainer = make(MultiGPUAddon)
    if kind != "shared":
        with pytest.raises(LoaderError, match="persistent_workers=False"):
            trainer.run(2, loader(STALE[kind](), batch_size=2))
        return
    trainer.run(2, loader(InTensor(), batch_size=2))
    assert trainer.seen == [0, 0, 1, 1]
