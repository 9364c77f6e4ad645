"""Copies beside the computation: nothing at all on the CPU, and in their order, copied, waited for, kept, elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import zae
from kit import hand
from kit.table import Task
from zae.addons import PrefetchAddon

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory")  # Of torch, which has no device to pin for here.


def make(cls: Any = Task, *add_ons: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return cls.add_on(*add_ons)(model, "cpu", optimizer=torch.optim.AdamW(model.parameters()), log_bar=False)


def pinning() -> DataLoader[Any]:
    return DataLoader(hand.data(8), batch_size=4, num_workers=1, pin_memory=True)


class AsIfPinned(DataLoader[Any]):
    """Says of its batches what a loader with workers does; those themselves would ask torch for a true device."""

    def __iter__(self) -> Any:
        return iter(DataLoader(self.dataset, batch_size=self.batch_size))


def as_if_pinned() -> AsIfPinned:
    return AsIfPinned(hand.data(8), batch_size=4, num_workers=1, pin_memory=True)


def words(notes: list[str]) -> list[str]:
    return [note for note in notes if note.startswith("PrefetchAddon")]


class Streams(TorchFunctionMode):
    """Stands in for the streams of a device, which a CPU has not: it notes what is asked of them, and each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.events.append(f"copy {'at once' if (kwargs or {}).get('non_blocking') else 'and wait'}")
        return func(*args, **(kwargs or {}))

    def stream(self, name: str) -> Any:
        events = self.events

        class Stream:
            def __enter__(self) -> None:
                events.append(f"to {name}")

            def __exit__(self, *_: object) -> None:
                events.append(f"from {name}")

            def wait_stream(self, other: Any) -> None:
                events.append(f"{name} waits for {other}")

            def __str__(self) -> str:
                return name

        return Stream()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let "meta" be an accelerator: copies to it are real ones, of shapes."""
    noted = Streams()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: noted.stream(f"computing on {device}"))

    class Stream:
        __enter__ = __exit__ = None

        def __new__(cls, device: torch.device) -> Any:
            return noted.stream(f"side of {device}")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: noted.events.append(f"{tensor.ndim}d kept for {stream}")
    )
    return noted


def test_on_the_cpu_no_bit_changes() -> None:
    """It may stand in a class for every machine."""
    plain, prefetched = make(), make(Task, PrefetchAddon)
    loader = pinning()
    prefetched.run(1, loader, loader)
    plain.run(1, loader, loader)
    assert prefetched.metrics == plain.metrics
    for left, right in zip(plain.unwrap().parameters(), prefetched.unwrap().parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_batch_is_copied_on_the_side_and_then_waited_for_and_kept(streams: Streams) -> None:
    """The order that makes the numbers the same; a step between two of these lines would read what is not there yet."""
    trainer = make(Task, PrefetchAddon)
    trainer.device = torch.device("meta")
    trainer.setup()
    loader = trainer.wrap_loader(as_if_pinned(), True)
    with streams:
        moved = [trainer.to_device(batch) for batch in trainer.batches(loader)]
    side, computing = "side of meta", "computing on meta"
    assert streams.events == [
        f"to {side}", "copy at once", "copy at once", f"from {side}", f"{computing} waits for {side}",
        f"2d kept for {computing}", f"1d kept for {computing}",
    ] * 2  # fmt: skip
    assert {each.device.type for batch in moved for each in batch} == {"meta"}
    trainer.teardown()


class Shapes(Task):
    """Returns what there is of a tensor without data."""

    def test_step(self, batch: Any) -> Any:
        return {"shape": tuple(self.model(batch[0]).shape), "device": batch[1].device.type}


def test_evaluation_goes_by_its_own_loader(streams: Streams) -> None:
    trainer = make(Shapes, PrefetchAddon)
    trainer.device = torch.device("meta")
    with streams:
        outputs = trainer.inference(as_if_pinned()), trainer.inference(DataLoader(hand.data(8), batch_size=4))
    assert outputs == ([{"shape": (4, 3), "device": "meta"}] * 2,) * 2
    assert [each for each in streams.events if each.startswith("to side")] == ["to side of meta"] * 2


class Parcel:
    """A batch that moves itself: nobody knows what it computes on the way."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Parcel:
        return self


@pytest.mark.parametrize(
    "batch",
    [Parcel(), [torch.ones(1), Parcel()], {"x": torch.eye(2).to_sparse()}],
    ids=["an object", "a list with one", "a sparse tensor"],
)
def test_what_moves_itself_is_moved_as_ever(streams: Streams, batch: Any) -> None:
    trainer = make(Task, PrefetchAddon)
    trainer.device = torch.device("meta")
    trainer.setup()
    for _ in trainer.batches(trainer.wrap_loader(as_if_pinned(), True)):
        trainer.to_device(batch)
    assert streams.events == []


class Augmenting(Task):
    """Does more than copy."""

    def to_device(self, batch: Any) -> Any:
        inputs, targets = super().to_device(batch)
        return inputs * self.scale, targets


def test_where_it_stands_aside_it_says_why(streams: Streams, caplog: pytest.LogCaptureFixture) -> None:
    """In the plan, and once in the log of a run on a device that could."""
    here = make(Task, PrefetchAddon)
    assert words(here.plan(1, pinning()).notes) == [
        "PrefetchAddon does nothing: cpu has no stream that copies beside the computation"
    ]
    there = make(Task, PrefetchAddon)
    there.device = torch.device("meta")
    assert words(there.plan(1, pinning()).notes) == []
    assert caplog.records == []
    (unpinned,) = words(there.plan(1, DataLoader(hand.data(8), batch_size=4)).notes)
    assert unpinned == (
        "PrefetchAddon does nothing: the loader (DataLoader, dataset TensorDataset of length 8, batch_size=4, "
        "drop_last=False) does not return each batch in its own pinned memory; write DataLoader(..., num_workers=2, "
        "pin_memory=True)"
    )
    there.wrap_loader(DataLoader(hand.data(8)), True)
    own = make(Augmenting, PrefetchAddon)
    own.device = torch.device("meta")
    (aside,) = words(own.plan(1, as_if_pinned()).notes)
    assert aside == "PrefetchAddon does nothing: Augmenting.to_device may do more than copy; do that in train_step"
    assert [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "zae"] == [
        (logging.WARNING, unpinned), (logging.WARNING, aside),
    ]  # fmt: skip


def test_it_takes_no_options() -> None:
    with pytest.raises(zae.errors.OptionError, match="unknown argument 'prefetch_batches'"):
        Task.add_on(PrefetchAddon)(torch.nn.Linear(4, 3), "cpu", mode="test", prefetch_batches=2)
