"""Loaders of every kind: walked, refused, and gone on with exactly where an epoch stood."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from kit import hand
from kit.hand import digest, network
from kit.table import Task, core_of, fingerprint
from zae import LoaderError
from zae.addons import GradientAccumulationAddon
from zae.checkpoint.encoding import decode, encode
from zae.data.loader_checks import check_loader
from zae.data.loaders import describe, has_pinned_batches, length_of


def build(*add_ons: Any, **options: Any) -> Any:
    model = network()
    return Task.add_on(*add_ons)(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), **options)


class Counting(Dataset[Any]):
    """Notes which samples it was asked for."""

    unsaved_attributes = ("asked",)  # Of each process by itself.

    def __init__(self, size: int = 22) -> None:
        self.data = hand.data(size)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.data[index]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


class Reversed:
    """A batch sampler of one's own, without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.size, 4):
            yield list(range(first, min(first + 4, self.size)))[::-1]


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda d: DataLoader(d, 4),
    "shuffled": lambda d: DataLoader(d, 4, shuffle=True),
    "shuffled, last dropped": lambda d: DataLoader(d, 4, shuffle=True, drop_last=True),
    "generator": lambda d: DataLoader(d, 4, shuffle=True, generator=seeded()),
    "random sampler": lambda d: DataLoader(d, 4, sampler=RandomSampler(d)),
    "random sampler, generator": lambda d: DataLoader(d, 4, sampler=RandomSampler(d, generator=seeded())),
    "replacement": lambda d: DataLoader(d, 4, sampler=RandomSampler(d, replacement=True, num_samples=50)),
    "replacement, generator": lambda d: DataLoader(
        d, 4, sampler=RandomSampler(d, replacement=True, num_samples=50, generator=seeded())
    ),
    "weighted": lambda d: DataLoader(d, 4, sampler=WeightedRandomSampler(range(1, len(d) + 1), 20)),
    "weighted, generator": lambda d: DataLoader(
        d, 4, sampler=WeightedRandomSampler(range(1, len(d) + 1), 20, generator=seeded())
    ),
    "batch sampler": lambda d: DataLoader(d, batch_sampler=BatchSampler(RandomSampler(d), 4, False)),
    "own batch sampler": lambda d: DataLoader(d, batch_sampler=Reversed(len(d))),
    "no batch size": lambda d: DataLoader(
        d, batch_size=None, sampler=BatchSampler(RandomSampler(d, generator=seeded()), 4, False)
    ),
    "two workers": lambda d: DataLoader(d, 4, shuffle=True, num_workers=2),
}


class ByBatch(Counting):
    """Takes a list of indices."""

    def __getitem__(self, index: Any) -> Any:
        self.asked.extend(index)
        return self.data[index]


def through_disk(state: Any) -> Any:
    structure, tensors = encode(state)
    return decode(json.loads(json.dumps(structure)), {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("name", [name for name in SAMPLERS if "workers" not in name])
@pytest.mark.parametrize("tensors", [False, True], ids=["samples", "tensors"])
def test_exact_at_every_step(name: str, tensors: bool) -> None:
    """Stopped after each step of two epochs; consumed samples are not asked for again."""
    kind = ByBatch if name == "no batch size" else Counting

    def make() -> tuple[Any, Any]:
        data = kind()
        return data, SAMPLERS[name](data.data if tensors else data)

    states: list[Any] = []
    whole = build(log_every=3)
    whole.checkpoint = lambda: states.append(through_disk(whole.state_dict()))
    data, batches = make()
    torch.manual_seed(3)
    whole.run(2, batches)
    end = {part: fingerprint(value) for part, value in core_of(whole).items()}
    steps = whole.progress_checker.step
    assert len(states) == steps + 2
    for state in states[:-1]:
        fresh = build(log_every=3)
        torch.manual_seed(99)
        fresh.load_state_dict(state)
        again, batches = make()
        fresh.progress_checker.run_calls.index = 0
        fresh.run(2, batches)
        found, step = core_of(fresh), state["progress"]["step"]
        for part, value in end.items():
            assert fingerprint(found[part]) == value, f"{part} after step {step}"
        used = step_samples(data.asked, state["progress"]["batch"], steps)
        assert tensors or again.asked == data.asked[used:], f"samples after step {step}"


def step_samples(asked: list[int], batch: int, batches: int) -> int:
    """How many samples the first batches were made of: 4 each, and the last of an epoch what is left."""
    each = len(asked) // 2
    return (batch // (batches // 2)) * each + (batch % (batches // 2)) * 4


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", ["shuffled", "generator", "replacement", "two workers"])
@pytest.mark.parametrize("stop", [1, 3, 6, 8])
def test_exact_in_pieces_and_in_another_process_of_workers(name: str, stop: int, caplog: Any) -> None:
    """By the same trainer and by a fresh one; with workers, a message says what is not exact."""
    ends = []
    for way in ("whole", "pieces", "fresh"):
        trainer, batches = build(), SAMPLERS[name](hand.data())
        torch.manual_seed(3)
        if way == "whole":
            trainer.run(3, batches)
        else:
            trainer.run(None, batches, max_steps=stop)
            if way == "fresh":
                state, trainer, batches = through_disk(trainer.state_dict()), build(), SAMPLERS[name](hand.data())
                trainer.load_state_dict(state)
                torch.manual_seed(99)
            trainer.run(3 - trainer.progress_checker.epoch, batches)
        ends.append(fingerprint(core_of(trainer)))
    assert ends[0] == ends[1] == ends[2]
    said = [record for record in caplog.records if "num_workers=2" in record.message]
    assert bool(said) == (name == "two workers" and stop % 6 != 0)


def test_a_long_epoch_is_skipped_in_the_sampler() -> None:
    """Of 20000 batches 19998 are passed over, and 2 loaded."""
    data = Counting(20000)
    trainer = build()
    batches = DataLoader(data, 1, shuffle=True)
    torch.manual_seed(1)
    trainer.current_run.set_up()
    next(trainer.batches(batches))
    state = trainer.state_dict()
    state["progress"].update(batch=19998, epoch_batch=19998, step=19998, epoch_step=19998)
    trainer.load_state_dict(state)
    data.asked.clear()
    assert [len(batch[0]) for batch in trainer.batches(batches)] == [1, 1]
    assert len(data.asked) == 2


# --- batches that are None


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6])
def test_batches_that_are_none_are_passed_over_and_counted(stop: int, caplog: Any) -> None:
    """Also by a resume, which neither repeats a batch nor leaves one out."""
    real = list(hand.loader(12, shuffle=False))
    batches = [None, real[0], None, real[1], real[2], None]
    whole = build()
    torch.manual_seed(1)
    whole.run(2, batches)
    assert whole.progress_checker.batch == 6
    assert "3 of 6 batches were None and were skipped" in caplog.text
    torch.manual_seed(1)
    first, second, third = build(), build(), build()
    first.run(None, batches, max_steps=stop)
    second.load_state_dict(through_disk(first.state_dict()))
    second.progress_checker.run_calls.index = 0
    second.run(2, batches)
    assert digest(second.model) == digest(whole.model)
    plain = build()
    torch.manual_seed(1)
    plain.run(2, real)
    assert digest(plain.model) == digest(whole.model)
    assert third.progress_checker.batch == 0


@pytest.mark.parametrize("batches", [[None, None], [None, None, "x"]])
def test_mostly_none_is_an_error(batches: list[Any]) -> None:
    """More than half."""
    given = [next(iter(hand.loader())) if batch == "x" else batch for batch in batches]
    with pytest.raises(LoaderError, match=rf"2 of {len(given)} batches were None \(list\); fix the collate_fn"):
        build().run(1, given)


# --- what is not a loader, or an empty one


def test_empty_loaders() -> None:
    """Refused before a step, with what was found."""
    empty = TensorDataset(torch.zeros(0, 4), torch.zeros(0).long())
    with pytest.raises(
        LoaderError, match=r"loader has 0 batches .DataLoader, .*length 0, batch_size=4, drop_last=False"
    ):
        build().run(1, DataLoader(empty, 4))
    with pytest.raises(LoaderError, match="length 22, batch_size=100, drop_last=True"):
        build().run(1, hand.loader(batch_size=100, drop_last=True))
    with pytest.raises(LoaderError, match="yielded 0 batches in epoch 1"):
        build().run(1, iter([]))
    with pytest.raises(LoaderError, match="valid_loader is an empty dict"):
        build().run(1, hand.loader(), {})
    with pytest.raises(LoaderError, match=r"valid_loader\['b'\] has 0 batches"):
        build().run(1, hand.loader(), {"a": hand.loader(), "b": []})


@pytest.mark.parametrize("value", [3, "text", b"bytes", torch.zeros(3), hand.data(), None])
def test_what_is_no_loader(value: Any) -> None:
    with pytest.raises(LoaderError, match=r"give batches|give a DataLoader"):
        check_loader(value)


class Endless(IterableDataset[Any]):
    """No length, and no end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(4), 1


class Unhelpful:
    """Its length is not implemented."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(list(hand.loader(8, shuffle=False)))


def test_loaders_without_a_length() -> None:
    """A generator works for an epoch, and is used up in the second; steps_per_epoch ends what has no end."""
    assert length_of(DataLoader(Endless(), 4)) is None
    assert length_of(Unhelpful()) is None
    assert build().run(2, Unhelpful())["step"] == 4
    assert build().run(1, (batch for batch in list(hand.loader())))["step"] == 6
    with pytest.raises(LoaderError, match="can be read once, and this run reads it in 2 epochs"):
        build().run(2, iter(list(hand.loader())))
    assert build().run(3, DataLoader(Endless(), 4), steps_per_epoch=5)["step"] == 15
    with pytest.raises(LoaderError, match="valid_loader is a list_iterator, which can be read once"):
        build().run(2, hand.loader(), iter(list(hand.loader(8))))


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 10])
def test_a_stream_resumes_by_passing_over(stop: int, caplog: Any) -> None:
    """A fresh generator stands where the old one was, also after several epochs of it; a message says so."""

    def stream() -> Iterator[Any]:
        numbers = seeded()
        while True:
            yield torch.randn(4, 4, generator=numbers), torch.randint(2, (4,), generator=numbers)

    caplog.set_level(logging.INFO, logger="zae")
    whole = build()
    torch.manual_seed(1)
    whole.run(3, stream(), steps_per_epoch=4)
    first, second = build(), build()
    torch.manual_seed(1)
    first.run(None, stream(), max_steps=stop, steps_per_epoch=4)
    second.load_state_dict(through_disk(first.state_dict()))
    second.progress_checker.run_calls.index = 0
    torch.manual_seed(77)
    second.run(3, stream(), steps_per_epoch=4)
    assert digest(second.model) == digest(whole.model)
    assert f"the first {stop} batches of the iterator are skipped" in caplog.text


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from hand.data()


def test_an_iterable_dataset_resumes_by_passing_over(caplog: Any) -> None:
    ends = []
    for stop in (None, 1, 4):
        trainer, batches = build(), DataLoader(Numbers(), 4)
        torch.manual_seed(1)
        if stop is not None:
            trainer.run(None, batches, max_steps=stop)
            state, trainer = through_disk(trainer.state_dict()), build()
            trainer.load_state_dict(state)
            assert "loaded and dropped" not in caplog.text
        trainer.run(2, batches)
        assert ("loaded and dropped" in caplog.text) == (stop is not None)
        caplog.clear()
        ends.append(digest(trainer.model))
    assert len(set(ends)) == 1


@pytest.mark.parametrize("batched", [True, False])
def test_a_sampler_in_a_batch_sampler_is_told_the_epoch(batched: bool) -> None:
    """A DistributedSampler draws an order by it: that of the loop by hand that tells it the epoch."""

    def loader() -> tuple[Any, DataLoader[Any]]:
        sampler: Any = DistributedSampler(range(12), num_replicas=1, rank=0)  # type: ignore[arg-type]
        batches = BatchSampler(sampler, 4, drop_last=False)
        dataset: Any = torch.arange(12.0)
        given: Any = {"batch_sampler": batches} if batched else {"sampler": batches, "batch_size": None}
        return sampler, DataLoader(dataset, **given)

    class Reads(Task):
        def train_step(self, batch: Any) -> Any:
            seen.append(batch.tolist())
            return {"loss": self.model.weight.sum()}

    seen: list[Any] = []
    model = nn.Linear(1, 1)
    Reads(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False).run(2, loader()[1])
    sampler, batches = loader()
    by_hand: list[Any] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        by_hand += [batch.tolist() for batch in batches]
    assert seen == by_hand
    assert seen[:3] != seen[3:]


def test_another_loader_begins_the_next_epoch() -> None:
    """An epoch that was left open is not gone on with by other data."""
    trainer = build()
    trainer.run(None, hand.loader(), max_steps=2)
    assert trainer.run(1, hand.loader(8))["step"] == 4
    assert trainer.progress_checker.epoch == 2
    assert [row["step"] for row in trainer.train_history] == [4]


def test_a_state_from_before_the_first_run_is_welcome() -> None:
    """The loader's own generators were not known yet."""
    first, second = build(), build()
    second.load_state_dict(through_disk(first.state_dict()))
    assert second.run(1, hand.loader(generator=seeded()))["step"] == 6


def test_windows_over_batches_that_are_none() -> None:
    """Of a loader without a length they are passed over; a length that counts them is refused in words."""
    real = list(hand.loader(12, shuffle=False))
    trainer = build(GradientAccumulationAddon, gradient_accumulation_steps=2)
    assert trainer.run(1, iter([real[0], None, real[1], real[2]]))["step"] == 2
    with pytest.raises(LoaderError, match="batches that are None count as well"):
        build(GradientAccumulationAddon, gradient_accumulation_steps=2).run(1, [real[0], None, real[1], real[2]])


def test_describe() -> None:
    assert describe(hand.loader()).endswith("length 22, batch_size=4, drop_last=False")
    assert "of unknown length" in describe(DataLoader(Endless(), 4))
    assert describe(SequentialSampler(range(3))) == "SequentialSampler"


# ------------------------------------------------------------------------------------------ copies nobody waits for


class Parcel:
    """A batch that moves itself, and notes how it was asked to."""

    asked: list[bool] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> Parcel:
        Parcel.asked.append(non_blocking)
        return self


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_only_batches_pinned_by_the_loader_are_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else may be one buffer, which its owner fills again while the copy goes on."""
    data = hand.data(8)
    pinned = DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)
    others = [DataLoader(data, pin_memory=True), DataLoader(data), DataLoader(data, num_workers=1), [data[:4]]]
    assert [has_pinned_batches(loader) for loader in (pinned, *others)] == [True, True, False, False, False]

    class Moving(Task):
        """Asks, in each step, how a batch would be moved to a GPU."""

        def train_step(self, batch: Any) -> Any:
            self.device = torch.device("cuda")
            self.to_device(Parcel())
            self.device = torch.device("cpu")
            self.to_device(Parcel())
            return super().train_step(batch)

        test_step = train_step

    monkeypatch.setattr(Parcel, "asked", [])
    # As in a torch that is built for CUDA, on a machine without a GPU.
    built_for = {False: torch.device("cuda"), True: None}
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: built_for[check_available]
    )
    model = network()
    trainer = Moving(model, "cpu", optimizer=AdamW(model.parameters()))
    trainer.run(1, pinned)
    assert Parcel.asked == [True, False] * 2
    assert not trainer.loader_position.pinned
    trainer.run(1, DataLoader(data, batch_size=4, num_workers=1))
    assert Parcel.asked[4:] == [False] * 4
    # A validation between two steps goes by its own loader.
    trainer.run(1, pinned, DataLoader(data, batch_size=8), valid_every=1)
    assert Parcel.asked[8:] == [True, False, False, False] * 2
    trainer.evaluate(pinned)
    assert Parcel.asked[16:] == [True, False] * 2
