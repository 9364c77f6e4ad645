"""SeededDataset: random numbers by seed, epoch and index, in any worker and after a resume."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, random_split
from torchdata.stateful_dataloader import StatefulDataLoader

from kit.faults import Child
from kit.hand import data, digest, network
from kit.table import Task
from zae import CheckpointMismatch, ConfigError
from zae.addons import StateManagerAddon
from zae.data import SeededDataset
from zae.data.seeded import is_seeded


class Transform:
    """Holds generators, as those of albumentations do."""

    def __init__(self):
        self.numpy, self.python = np.random.default_rng(3), random.Random(3)
        self.torch, self.old = torch.Generator().manual_seed(3), np.random.RandomState(3)

    def draw(self):
        return [self.numpy.random(), self.python.random(), torch.rand((), generator=self.torch).item(), self.old.rand()]


class Augmented(Dataset):
    """Draws from each global stream, and from generators of its own."""

    def __init__(self, count=22):
        self.count, self.transforms = count, [Transform()]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        own = self.transforms[0].draw()
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(), *own])
        return torch.cat([drawn, torch.tensor([float(index)])]), torch.tensor(index % 2)


def batches(kind=DataLoader, **options):
    data = SeededDataset(Augmented(), seed=5)
    made = []
    loader = kind(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1), **options)
    for epoch in range(2):
        data.set_epoch(epoch)
        rows = torch.cat([inputs for inputs, _ in loader])
        made.append(rows[rows[:, -1].argsort()])  # Loaders draw their order in different ways.
    return torch.stack(made)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_samples_are_the_same_with_any_number_of_workers(kind):
    """Workers that persist see the next epoch; each sample and each epoch has its own numbers."""
    expected = batches()
    assert expected[..., :-1].unique().numel() == 2 * 22 * 7
    assert torch.equal(batches(kind, num_workers=2), expected)
    if kind is DataLoader:
        assert torch.equal(batches(num_workers=1, persistent_workers=True), expected)


def inner(count=8, seed=0):
    return SeededDataset(Augmented(count), seed)


class Wrapped(Dataset):
    """Another dataset around one, as a user's own."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


WHERE = {
    "Subset": lambda: {"dataset": Subset(inner(), range(6))},
    "random_split, twice": lambda: {"dataset": random_split(random_split(inner(), [6, 2])[0], [4, 2])[0]},
    "ConcatDataset": lambda: {"dataset": ConcatDataset([inner(), inner(seed=1)])},
    "a dataset of its own": lambda: {"dataset": Wrapped(inner())},
    "ConcatDataset of a Subset": lambda: {"dataset": ConcatDataset([inner(), Subset(inner(seed=1), range(6))])},
    "around a Subset": lambda: {"dataset": SeededDataset(Subset(inner(), range(6)))},
}


@pytest.mark.parametrize("where", list(WHERE))
def test_each_epoch_has_its_own_numbers_wherever_the_dataset_stands(where, caplog):
    """The epoch was not passed on by a dataset around it, and each epoch had the augmentation of the first."""
    drawn = {}

    class Drawn(Task):
        def train_step(self, batch):
            drawn.setdefault(self.progress_checker.epoch, []).extend(batch[0][:, 0].tolist())
            return super().train_step((batch[0][:, :4], batch[1]))

    def run(**options):
        model = network()
        trainer = Drawn(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False)
        trainer.run(3, DataLoader(**WHERE[where](), batch_size=2, **options))
        return {number for numbers in drawn.values() for number in numbers}

    assert len(run()) == sum(map(len, drawn.values()))
    assert len(drawn) == 3
    if where == "ConcatDataset":
        before = drawn.copy()
        drawn.clear()
        run(num_workers=1, persistent_workers=True)
        assert drawn == before


def test_a_resume_is_exact_where_all_samples_are_seeded():
    """By classes that draw nothing themselves; a dataset of one's own may."""
    assert is_seeded(Subset(ConcatDataset([inner(), inner()]), [1]))
    assert not is_seeded(ConcatDataset([inner(), Augmented()]))
    assert not is_seeded(Wrapped(inner()))
    assert not is_seeded(Subset(Augmented(), [1]))


def test_the_streams_of_training_are_left_as_they_are():
    data = SeededDataset(Augmented())
    streams = data.dataset.transforms[0]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    own = streams.numpy.bit_generator.state, streams.torch.get_state().tolist(), streams.python.getstate()
    data[3], data[np.int64(4)]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (streams.numpy.bit_generator.state, streams.torch.get_state().tolist(), streams.python.getstate()) == own
    assert torch.equal(data[4][0], data[np.int64(4)][0])
    assert torch.equal(data[4][0], data[torch.tensor(4)][0])


class Seen(Task):
    """Notes the inputs of each step."""

    def train_step(self, batch):
        with open(self.save_path / "seen", "a", encoding="ascii") as file:
            file.write(f"{self.progress_checker.step} {batch[0].numpy().tobytes().hex()}\n")
        return super().train_step((batch[0][:, :4], batch[1]))


def train(folder, kind, kill_at=None):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = network()
    trainer = Seen.add_on(StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=folder, save_every=1,
        resume="auto", seed=2, log_bar=False,
    )  # fmt: skip

    def end(outputs):
        if trainer.progress_checker.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.on_step_end = end
    trainer.run(2, kind(SeededDataset(Augmented(), seed=5), batch_size=4, shuffle=True, num_workers=2))
    return digest(model)


@pytest.mark.parametrize("kind", [StatefulDataLoader, pytest.param(DataLoader, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_in_mid_epoch_sees_the_same_batches(tmp_path, kind, caplog):
    """Killed in the second epoch, with two workers: the batches are bitwise those of the run that was not killed."""
    assert Child(lambda: train(tmp_path / "killed", kind, 9)).wait().status == -signal.SIGKILL
    expected, found = train(tmp_path / "whole", kind), train(tmp_path / "killed", kind)
    rows = {
        name: dict(line.split() for line in (tmp_path / name / "seen").read_text().splitlines())
        for name in ("whole", "killed")
    }
    assert len(rows["whole"]) == 12
    assert rows["killed"] == rows["whole"]
    assert found == expected
    assert "exact" not in caplog.text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (2, 1)])
def test_another_number_of_workers_of_a_stateful_loader_is_refused(before, after, tmp_path):
    """Its state is that of its workers; torchdata refuses it with a text about its own keys, or without one."""

    def build(**options):
        model = network()
        return Task.add_on(StateManagerAddon)(
            model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=tmp_path, save_every=1,
            resume="auto", log_bar=False, **options,
        )  # fmt: skip

    def loader(workers):
        return StatefulDataLoader(SeededDataset(data()), 4, shuffle=True, num_workers=workers)

    build().run(1, loader(before), max_steps=2)
    with pytest.raises(CheckpointMismatch, match=f"does not fit num_workers={after} .*as many workers as it was saved"):
        build().run(1, loader(after))
    assert build(mid_epoch="restart").run(1, loader(after))["epoch"] == 1


@pytest.mark.parametrize("where", [lambda given: given, lambda given: Subset(given, range(22))])
def test_another_seed_is_refused_in_a_resume(where, tmp_path):
    """The rest of the epoch would have other augmentation."""

    def build(**options):
        model = network()
        return Task.add_on(StateManagerAddon)(
            model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=tmp_path, save_every=1,
            resume="auto", log_bar=False, **options,
        )  # fmt: skip

    build().run(1, DataLoader(where(SeededDataset(data(), 1)), 4), max_steps=2)
    for changed, now in ((SeededDataset(data(), 2), "2"), (data(), "unknown")):
        with pytest.raises(CheckpointMismatch, match=f"seed of the SeededDataset was 1 and is {now}"):
            build().run(1, DataLoader(where(changed), 4))


def test_a_stream_has_no_index():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(ConfigError, match=r"SeededDataset reads a dataset by index, and this is .*Stream"):
        SeededDataset(Stream())
    with pytest.raises(ConfigError, match="seed=-1"):
        SeededDataset([1], seed=-1)
