"""What a loader's parts keep themselves: random streams, wherever they are, and places; and loaders of one's own."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_loading import through_disk
from torch.optim import AdamW
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from kit import hand
from kit.hand import network
from kit.table import Task, core_of, fingerprint
from zae import CheckpointMismatch
from zae.data import SeededDataset
from zae.data.loader_parts import LoaderParts
from zae.data.loader_state import capture_parts, restore_parts

SIZE = 22


def build() -> Any:
    model = network()
    return Task(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), seed=7, log_bar=False)


class Noise:
    """A transform with its own stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __call__(self, inputs: Any) -> Any:
        stream = self.stream
        drawn = torch.rand((), generator=stream) if isinstance(stream, torch.Generator) else stream.random()
        return inputs + 0.1 * float(drawn)


class Chain:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, inputs: Any) -> Any:
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs


class Augmented(Dataset[Any]):
    """Draws in its transforms."""

    def __init__(self) -> None:
        self.data = hand.data(SIZE)
        self.transform = Chain(
            Noise(np.random.default_rng(8)), Noise(random.Random(9)), Noise(torch.Generator().manual_seed(10))
        )

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        return self.transform(inputs), target


class Collate(Noise):
    def __call__(self, samples: Any) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return super().__call__(torch.stack(inputs)), torch.stack(targets)

    def method(self, samples: Any) -> Any:
        return self(samples)


class Order(Sampler[int]):
    """Its generator has its own name."""

    def __init__(self) -> None:
        self.stream = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.stream).tolist())


class Place(IterableDataset[Any]):
    """A stream that says how far it is; what it is given is where its next epoch begins, as in torchdata's samplers."""

    def __init__(self) -> None:
        self.data, self.at, self.begin_at = hand.data(SIZE), 0, None

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin_at = self.begin_at or 0, None
        while self.at < SIZE:
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["at"]


class Cursor(Order):
    """A sampler like it, which draws a new order each time that it is begun, also where nothing is left of it."""

    state_dict, load_state_dict = Place.state_dict, Place.load_state_dict

    def __init__(self) -> None:
        super().__init__()
        self.at, self.begin_at = 0, None

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        self.at, self.begin_at = self.begin_at or 0, None
        while self.at < SIZE:
            self.at += 1
            yield order[self.at - 1]


class Lengths(Sampler[list[int]]):
    """Another number of batches in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def _batches(self) -> list[list[int]]:
        draw, left, made = np.random.default_rng(self.epoch), list(range(SIZE)), []
        while left:
            size = min(int(draw.integers(2, 7)), len(left))
            size += len(left) - size == 1
            made.append(left[:size])
            left = left[size:]
        return made

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())


class Ongoing(Task):
    """Sets the epoch, as one does by hand."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.sampler.epoch = self.progress_checker.epoch  # type: ignore[attr-defined]


class Lazy(DataLoader[Any]):
    """A generator, which asks the sampler when it is asked itself."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Threaded(DataLoader[Any]):
    """Fetches in a thread, ahead of what is asked for."""

    def __iter__(self) -> Any:
        batches, fetched = super().__iter__(), queue.Queue(2)  # type: ignore[var-annotated]

        def fetch() -> None:
            for batch in batches:
                fetched.put(batch)
            fetched.put(None)

        threading.Thread(target=fetch, daemon=True).start()
        return iter(fetched.get, None)


class Again:
    """Its own iterator, which begins again when it is asked for."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.begun = loader, 0

    def __iter__(self) -> Any:
        self.begun += 1
        self.batches = iter(self.loader)
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class AgainInOrder(Sampler[list[int]]):
    """A batch sampler that is its own iterator, and draws a new order when it is asked for one."""

    def __iter__(self) -> Any:
        self.order = torch.randperm(SIZE).tolist()
        return self

    def __next__(self) -> list[int]:
        if not self.order:
            raise StopIteration
        self.order, batch = self.order[4:], self.order[:4]
        return batch

    def __len__(self) -> int:
        return -(-SIZE // 4)


class Own:
    """No DataLoader at all."""

    def __init__(self) -> None:
        self.stream, self.data = np.random.default_rng(3), hand.data(SIZE)

    def __iter__(self) -> Iterator[Any]:
        for rows in np.split(self.stream.permutation(20), 5):
            yield self.data[torch.tensor(rows)]


class Shuffled(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (hand.data(SIZE)[index] for index in torch.randperm(SIZE).tolist())


LOADERS: dict[str, Callable[[], Any]] = {
    "transforms": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "datasets in datasets": lambda: DataLoader(
        ConcatDataset([Subset(Augmented(), range(9)), Subset(Augmented(), range(9, SIZE))]), 4, shuffle=True
    ),
    "collate": lambda: DataLoader(hand.data(SIZE), 4, shuffle=True, collate_fn=Collate(random.Random(4))),
    "method": lambda: DataLoader(hand.data(SIZE), 4, shuffle=True, collate_fn=Collate(random.Random(4)).method),
    "sampler": lambda: DataLoader(hand.data(SIZE), 4, sampler=Order()),
    "place of a sampler": lambda: DataLoader(hand.data(SIZE), 4, sampler=Cursor()),
    "torchdata's sampler": lambda: DataLoader(
        hand.data(SIZE), 4, sampler=StatefulDistributedSampler(hand.data(SIZE), 1, 0)
    ),
    "place of a stream": lambda: DataLoader(Place(), 4),
    "shuffled stream": lambda: DataLoader(Shuffled(), 4),
    "generator": lambda: Lazy(hand.data(SIZE), 4, shuffle=True),
    "thread": lambda: Threaded(hand.data(SIZE), 4, shuffle=True),
    "a sampler begins again": lambda: DataLoader(hand.data(SIZE), batch_sampler=AgainInOrder()),
    "begins again": lambda: Again(hand.loader(generator=torch.Generator().manual_seed(2))),
    "own": Own,
}


def states_of(make: Callable[[], Any], trainer: Any, n_epoch: int = 3) -> tuple[list[Any], dict[str, Any]]:
    """Train, and return the state of each checkpoint and what it ended with."""
    states: list[Any] = []
    trainer.checkpoint = lambda: states.append(through_disk(trainer.state_dict()))
    trainer.run(n_epoch, make())
    return states, core_of(trainer)


def goes_on(trainer: Any, state: Any, loader: Any, n_epoch: int = 3) -> dict[str, Any]:
    """What a new process ends with."""
    torch.manual_seed(99)
    trainer.progress_checker.is_seeded = True
    trainer.load_state_dict(state)
    trainer.progress_checker.run_calls.index = 0
    trainer.run(n_epoch, loader)
    return core_of(trainer)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [part for part, value in one.items() if fingerprint(other[part]) != fingerprint(value)]


LOADERS["torchdata's loader"] = lambda: StatefulDataLoader(
    hand.data(SIZE), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
)


@pytest.mark.sample(count=6)
@pytest.mark.parametrize("name", list(LOADERS))
def test_whatever_the_parts_of_a_loader_keep(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Streams in transforms, places of samplers and streams, loaders that iterate in a way of their own."""
    states, end = states_of(LOADERS[name], build())
    per_epoch = (len(states) - 3) // 3
    # In the first epoch, after its last step, between two epochs, in the second and as the third is complete.
    for index in (2, per_epoch - 1, per_epoch, 2 * per_epoch + 1, 2 * per_epoch + 3):
        assert differing(end, goes_on(build(), states[index], LOADERS[name]())) == [], states[index]["progress"]
    assert "exact" not in caplog.text


def test_resumed_twice_in_one_epoch() -> None:
    """What is saved by a run that was resumed is resumed again; a sampler's place is that of the sampler."""
    for name in ("place of a sampler", "begins again"):
        states, end = states_of(LOADERS[name], build())
        for first in (3, 8):  # In the first epoch, and in the second.
            middle = build()
            again: list[Any] = []
            middle.checkpoint = lambda middle=middle, again=again: again.append(through_disk(middle.state_dict()))
            assert differing(end, goes_on(middle, states[first], LOADERS[name]())) == []
            for state in again[1:-1:4]:
                assert differing(end, goes_on(build(), state, LOADERS[name]())) == [], (name, state["progress"])


def test_a_number_of_batches_that_is_another_in_each_epoch() -> None:
    """A batch sampler of one's own may have another length in each epoch; what it keeps is put back."""

    def ongoing() -> tuple[Any, Any]:
        model, sampler = network(), Lengths()
        made = Ongoing(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), seed=7, log_bar=False)
        made.sampler = sampler
        return made, DataLoader(hand.data(SIZE), batch_sampler=sampler)

    trainer, loader = ongoing()
    states, end = states_of(lambda: loader, trainer)
    lengths = {state["position"]["facts"]["number of batches"] for state in states}
    assert len(lengths) > 1
    for state in states[:-1:2]:
        assert differing(end, goes_on(*_pair(ongoing(), state))) == [], state["progress"]


def _pair(made: tuple[Any, Any], state: Any) -> tuple[Any, Any, Any]:
    return made[0], state, made[1]


def test_a_stateful_loader_goes_on_in_a_later_call_of_run() -> None:
    """What a later call saves of an epoch that an earlier one left open is not the earlier one's place."""
    make = lambda: StatefulDataLoader(hand.data(SIZE), batch_size=4, shuffle=True)  # noqa: E731

    def train(trainer: Any, loader: Any, *steps: int) -> Any:
        for each in steps:
            trainer.run(None, loader, max_steps=each)
        return core_of(trainer)

    torch.manual_seed(1)
    trainer, states = build(), []
    trainer.checkpoint = lambda: states.append(through_disk(trainer.state_dict()))
    end = train(trainer, make(), 3, 5)
    for state in states[:-1]:
        torch.manual_seed(99)
        again = build()
        again.progress_checker.is_seeded = True
        again.load_state_dict(state)
        again.progress_checker.run_calls.index = 0
        assert differing(end, train(again, make(), 3, 5)) == [], state["progress"]


def test_workers_that_persist_draw_their_seed_once() -> None:
    """In an uninterrupted run they get it in the first epoch; a resumed one begins them later, and must not draw.

    Else every later epoch has another order: samples twice, and others not at all.
    """

    def make() -> Any:
        return DataLoader(hand.data(SIZE), 8, shuffle=True, num_workers=1, persistent_workers=True)

    states, end = states_of(make, build())
    assert states[1]["position"].get("persists") is None, "the first epoch draws it"
    assert differing(end, goes_on(build(), states[4], make())) == [], "in the second epoch, and in the third"
    assert differing(end, goes_on(build(), states[3], make())) == [], "between two epochs"
    once, twice, loader = build(), build(), make()
    once.run(None, make(), max_steps=8)
    twice.run(None, loader, max_steps=5)
    twice.run(None, loader, max_steps=3)
    assert hand.digest(once.unwrap()) == hand.digest(twice.unwrap()), "in a later call of run"


def test_an_iterator_that_begins_again_is_asked_once_an_epoch() -> None:
    """As ``for batch in loader`` does; and a later call of run continues with it where it stands."""
    loader = Again(hand.loader(shuffle=False))
    trainer = build()
    given: list[Any] = []
    step = trainer.train_step
    trainer.train_step = lambda batch: (given.append(batch[0]), step(batch))[1]
    trainer.run(None, loader, max_steps=8)
    trainer.run(None, loader, max_steps=4)
    assert loader.begun == 2
    assert all(map(torch.equal, given, [batch[0] for batch in hand.loader(shuffle=False)] * 2))


@pytest.mark.parametrize("at", [1, 4, 6, 9])
def test_an_iterator_over_several_epochs_is_read_again_from_its_beginning(at: int) -> None:
    """The order that ``cycle`` keeps was drawn as the first epoch began, whichever is resumed."""

    def loader() -> Any:
        return itertools.cycle(hand.loader(12))

    lengths: dict[str, Any] = {"max_steps": 10, "steps_per_epoch": 3}
    straight, states = build(), []
    straight.checkpoint = lambda: states.append((straight.progress_checker.step, through_disk(straight.state_dict())))
    straight.run(None, loader(), **lengths)
    resumed = build()
    torch.manual_seed(99)
    resumed.load_state_dict(next(state for step, state in states if step == at))
    resumed.progress_checker.run_calls.index, resumed.progress_checker.is_seeded = 0, True
    resumed.run(None, loader(), **lengths)
    assert resumed.progress_checker.step == 10
    assert hand.digest(resumed.unwrap()) == hand.digest(straight.unwrap())


def test_a_validation_draws_no_number_from_what_it_shares_with_training() -> None:
    """Parts of one dataset: neither the weights nor, after a resume, the records depend on validations."""

    def loaders() -> tuple[Any, Any]:
        dataset = Augmented()
        return DataLoader(Subset(dataset, range(12)), 4, shuffle=True), DataLoader(Subset(dataset, range(12, SIZE)), 4)

    with_it, without = build(), build()
    states: list[Any] = []
    with_it.checkpoint = lambda: states.append(through_disk(with_it.state_dict()))
    with_it.run(3, *loaders())
    without.run(3, loaders()[0])
    assert hand.digest(with_it.unwrap()) == hand.digest(without.unwrap())
    resumed = build()
    resumed.load_state_dict(states[5])
    resumed.progress_checker.run_calls.index, resumed.progress_checker.is_seeded = 0, True
    resumed.run(3, *loaders())
    assert resumed.progress_checker.epoch == 3
    assert differing(core_of(with_it), core_of(resumed)) == []
    before = capture_parts(LoaderParts(loaders()[0]))
    train, valid = loaders()
    build().plan(1, train, valid)
    assert fingerprint(capture_parts(LoaderParts(train))) == fingerprint(before)


class Masks:
    """A collate function that makes its stream at its first batch, as that of `transformers` for masked words does."""

    def __init__(self, make: Any) -> None:
        self.make, self.stream = make, None

    def __call__(self, rows: Any) -> Any:
        self.stream = self.stream or self.make()
        inputs, targets = torch.utils.data.default_collate(rows)
        drawn = torch.rand(1, generator=self.stream) if isinstance(self.stream, torch.Generator) else None
        return inputs * (self.stream.random() if drawn is None else drawn), targets


@pytest.mark.parametrize(
    "make", [lambda: torch.Generator().manual_seed(7), lambda: np.random.default_rng(7)], ids=["torch", "numpy"]
)
def test_an_evaluation_before_training_makes_a_stream_and_draws_nothing(make: Any) -> None:
    """The stream that a plan or a baseline makes is given back with nothing drawn from it."""

    def weights(watched: bool) -> str:
        torch.manual_seed(0)
        trainer, collate = build(), Masks(make)
        train, valid = (DataLoader(hand.data(12), 4, collate_fn=collate) for _ in range(2))
        if watched:
            trainer.plan(1, train, valid)
            trainer.evaluate(valid)
        trainer.run(1, train, valid)
        return hand.digest(trainer.unwrap())

    assert weights(watched=True) == weights(watched=False)


def test_a_stream_that_is_made_later_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """A stream that is not there yet as a run resumes is one warning; a part without its state is an error."""
    dataset = Augmented()
    state = capture_parts(LoaderParts(DataLoader(dataset, 4)))
    assert sorted(state) == [f"dataset.transform.transforms.{index}.stream" for index in range(3)]
    dataset.transform.transforms.pop()
    for _ in range(2):
        restore_parts(LoaderParts(DataLoader(dataset, 4)), state)
    said = [record.getMessage() for record in caplog.records if "not exact" in record.getMessage()]
    assert len(said) == 1
    assert "dataset.transform.transforms.2.stream" in said[0]
    with pytest.raises(CheckpointMismatch, match=r"transforms\.0\.stream does not fit"):
        restore_parts(
            LoaderParts(DataLoader(dataset, 4)), {"dataset.transform.transforms.0.stream": random.Random(1).getstate()}
        )
    with pytest.raises(CheckpointMismatch, match="the loader's sampler, but this one cannot load"):
        restore_parts(LoaderParts(DataLoader(dataset, 4)), {"sampler": {"at": 3}})


def test_long_lists_are_not_looked_through() -> None:
    """The samples of a dataset cost a checkpoint nothing, and what holds itself has an end."""

    class Many(Dataset[Any]):
        def __init__(self) -> None:
            self.samples = [random.Random(index) for index in range(100)]
            self.nested = [[[[] for _ in range(20)] for _ in range(20)] for _ in range(20)]
            self.own = self
            self.stream = random.Random(1)

    assert list(capture_parts(LoaderParts(type("Loader", (), {"dataset": Many()})()))) == ["dataset.stream"]


def test_a_stream_that_draws_as_it_goes_is_refused() -> None:
    """Batches that are read again, while their order is drawn between them and training draws too: others come."""

    def endless() -> Iterator[Any]:
        while True:
            yield from (hand.data(SIZE)[rows] for rows in torch.randperm(SIZE).split(4))

    def run(trainer: Any, **options: Any) -> None:
        trainer.run(2, endless(), steps_per_epoch=6, **options)

    trainer, states = build(), []
    trainer.checkpoint = lambda: states.append(through_disk(trainer.state_dict()))
    run(trainer)
    again = build()
    again.load_state_dict(states[8])
    again.progress_checker.run_calls.index = 0
    with pytest.raises(CheckpointMismatch, match=r"generator yields other batches .* from a generator of its own"):
        run(again)


class Collator:
    """Has a state, and a random stream that is a part of it."""

    def __init__(self) -> None:
        self.calls, self.stream = 0, random.Random(1)

    def __call__(self, samples: list[Any]) -> list[Any]:
        self.calls += 1
        return samples

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_collator_with_a_state_is_asked_for_it() -> None:
    """Its streams are its own concern then. The object of a bound method is not asked: it may be the trainer."""
    collator = Collator()
    loader = DataLoader(range(4), batch_size=2, collate_fn=collator)  # type: ignore[arg-type]
    assert len(list(loader)) == 2
    state = capture_parts(LoaderParts(loader))
    assert state == {"collate_fn": {"calls": 2}}
    collator.calls = 0
    restore_parts(LoaderParts(loader), state)
    assert collator.calls == 2
    bound = DataLoader(range(4), batch_size=2, collate_fn=collator.__call__)  # type: ignore[arg-type]
    assert list(capture_parts(LoaderParts(bound))) == ["collate_fn.stream"]


class Reversed(torch.utils.data.Sampler[int]):
    """Draws its order from its own generator, and has no state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SIZE, generator=self.generator).flip(0).tolist()


@pytest.mark.sample(count=2)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE),
        lambda: torch.utils.data.SubsetRandomSampler(range(SIZE)),
        lambda: torch.utils.data.RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(2)),
        Reversed,
    ],
)
def test_a_stateful_loader_over_a_sampler_without_a_state(sampler: Any) -> None:
    """It would begin the sampler anew within the epoch; the order is that of the epoch all the same."""

    def make() -> Any:
        return StatefulDataLoader(hand.data(SIZE), 8, sampler=sampler())

    states, end = states_of(make, build())
    for at in (1, 2, 4, 5):
        assert differing(end, goes_on(build(), states[at], make())) == [], at


ORDERS: dict[str, Any] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(2)},
    "without a state": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_stateful_loader_whose_workers_persist(order: str) -> None:
    """Resumed at the end of an epoch, its new workers draw no seed that those of an uninterrupted run had already."""

    def make() -> Any:
        return StatefulDataLoader(hand.data(SIZE), 8, num_workers=1, persistent_workers=True, **ORDERS[order]())

    states, end = states_of(make, build())
    for at in (3, 4, 5):
        assert differing(end, goes_on(build(), states[at], make())) == [], at


def test_a_stateful_loader_says_that_its_workers_draw_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Its state has no random streams of the workers; over a SeededDataset they do not matter."""
    for wrap, is_told in ((lambda data: data, True), (SeededDataset, False)):
        make = lambda: StatefulDataLoader(wrap(hand.data(SIZE)), 8, num_workers=1)  # noqa: E731, B023
        states, _ = states_of(make, build())
        caplog.clear()
        goes_on(build(), states[4], make())
        assert ("in its workers are not exact" in caplog.text) == is_told


class Rows(IterableDataset[Any]):
    """Has no state; each worker yields its share of the samples."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        dataset = hand.data(SIZE)
        yield from (dataset[index] for index in range(first, SIZE, step))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_over_a_stream_without_a_state_is_resumed_again_and_again(num_workers: int) -> None:
    """Its own state would count batches that it skips twice, and the second resume in an epoch would lose samples."""

    def make() -> Any:
        return StatefulDataLoader(Rows(), 4, num_workers=num_workers)

    _, end = states_of(make, build(), 2)
    states: list[Any] = []
    for at in (1, 2, 4, 5, 8, None):
        trainer = build()
        if states:
            trainer.progress_checker.is_seeded = True
            trainer.load_state_dict(states[-1])
            trainer.progress_checker.run_calls.index = 0
        trainer.run(2, make(), max_steps=at)
        states.append(through_disk(trainer.state_dict()))
    assert differing(end, core_of(trainer)) == []


class Endless:
    """Keeps an iterator over its epochs, where nothing looks."""

    def __init__(self, is_shuffled: bool) -> None:
        rest = self.samples(is_shuffled)
        self.take = lambda: next(rest)

    def __len__(self) -> int:
        return 3

    def samples(self, is_shuffled: bool) -> Iterator[Any]:
        batches = list(DataLoader(hand.data(12), batch_size=4))
        stream = random.Random(3)
        while True:
            yield from stream.sample(batches, 3) if is_shuffled else batches

    def __iter__(self) -> Iterator[Any]:
        return (self.take() for _ in range(3))


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("is_shuffled", [True, False])
@pytest.mark.parametrize("at", [3, 7, 11])
def test_a_loader_that_begins_again_after_a_resume_is_named_once(
    at: int, is_shuffled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where one epoch was before it, and the next ones say that it is shuffled; one that is not is right."""
    states, _ = states_of(lambda: Endless(is_shuffled), build(), 6)
    caplog.clear()
    goes_on(build(), states[at], Endless(is_shuffled), 6)
    said = [each for each in caplog.records if "the Endless began again with this resume" in each.getMessage()]
    assert len(said) == is_shuffled
