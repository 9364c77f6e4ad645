"""What tasks, modules, samplers and datasets of users keep goes on after a resume, and nothing is said of it."""

from __future__ import annotations

import colorsys
import math
import random
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset, TensorDataset, WeightedRandomSampler

from kit import hand
from zae import Every, Trainer
from zae.addons import StateManagerAddon

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
STREAM = np.random.default_rng(0)  # A global of the script, which begins anew with each process: see `begin`.
BANK = torch.zeros(24)
TEACHER = nn.Linear(4, 2)


def begin():
    """Make the globals as when the script starts."""
    global STREAM, BANK, TEACHER
    STREAM, BANK, TEACHER = np.random.default_rng(0), torch.zeros(24), nn.Linear(4, 2)


class Task(Trainer):
    """Classification; what it does after a step is given."""

    def train_step(self, batch):
        return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

    test_step = train_step
    after = None

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        if type(self).after is not None:
            type(self).after(self.current_run.user_loader)


def trainer_of(folder, cls, model, scheduler=None):
    return cls.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=torch.optim.Adam,
        scheduler=scheduler,
        save_path=folder,
        seed=0,
        save_every=Every(epochs=9),
        resume="auto",
        log_bar=False,
    )


def told(make, tmp_path, caplog, task=Task, model=lambda: nn.Linear(4, 2), scheduler=None):
    """Return the weights of a straight run and of one in two parts, and the warnings."""
    digests = []
    for folder, limits in ((tmp_path / "straight", (None,)), (tmp_path / "parts", (4, None))):
        for limit in limits:
            begin()
            loader, after = make()
            made = trainer_of(folder, type("Task", (task,), {"after": staticmethod(after) if after else None}), model,
                              scheduler() if scheduler else None)  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                made.run(3, loader, max_steps=limit)
        digests.append(hand.digest(made.unwrap()))
    return digests, [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def loader_of(dataset=None, **options):
    return DataLoader(dataset or TensorDataset(X, Y.clone()), **{"batch_size": 8, "shuffle": True, **options})


# ------------------------------------------------------------------------------------------- random streams are saved


class Noisy(Dataset):
    """Draws in each sample, from a stream that a function finds."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return noise(X[index]), Y[index]


class WithTransform(Noisy):
    """Draws in a function that it was given."""

    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(X[index]), Y[index]


def noise(row):
    return row + 0.1 * float(STREAM.standard_normal())


def of_closure(kind):
    stream = {"torch": torch.Generator().manual_seed(3), "numpy": np.random.default_rng(3), "random": random.Random(3)}
    draw = {
        "torch": lambda: float(torch.rand((), generator=stream["torch"])),
        "numpy": lambda: float(stream["numpy"].random()),
        "random": lambda: stream["random"].random(),
    }[kind]
    held = stream[kind]

    def transform(row):
        return row + 0.1 * draw() if held is not None else row

    return transform


def plain_closure():
    stream = torch.Generator().manual_seed(3)
    return lambda rows: (
        torch.stack([x + torch.rand((), generator=stream) for x, _ in rows]),
        torch.stack([y for _, y in rows]),
    )


def scaled(scale, rows):
    return torch.stack([x + scale * float(STREAM.random()) for x, _ in rows]), torch.stack([y for _, y in rows])


class Drawn(Sampler):
    """An order that a global stream of the script gives."""

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(STREAM.permutation(24).tolist())


STREAMS = {
    "a global that a dataset reads": lambda: loader_of(Noisy()),
    "within a Subset": lambda: loader_of(Subset(Noisy(), range(24))),
    "within a ConcatDataset": lambda: loader_of(ConcatDataset([Noisy(), TensorDataset(X, Y)])),
    "a closure of collate_fn": lambda: loader_of(collate_fn=plain_closure()),
    "a partial as collate_fn": lambda: loader_of(collate_fn=partial(scaled, 0.1)),
    "a function as transform": lambda: loader_of(WithTransform(noise)),
    "a closure as transform": lambda: loader_of(WithTransform(of_closure("numpy"))),
    "a sampler": lambda: loader_of(sampler=Drawn(), shuffle=None),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_of_the_script_that_the_loader_reads_is_restored(kind, tmp_path, caplog):
    (straight, resumed), said = told(lambda: (STREAMS[kind](), None), tmp_path, caplog)
    assert resumed == straight
    assert not said


# ------------------------------------------------------------------------------------------------ the rest is named


class Counting(Sampler):
    """Counts its epochs itself."""

    def __init__(self, has_set_epoch=False):
        self.epoch = 0
        if has_set_epoch:
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

    def __len__(self):
        return 24

    def __iter__(self):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        if not hasattr(self, "set_epoch"):
            self.epoch += 1
        return iter(order)


class Stateful(WeightedRandomSampler):
    """Saves its weights."""

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def weighted(kind):
    return loader_of(sampler=kind(torch.ones(24, dtype=torch.double), 24), shuffle=None)


def reweight(loader):
    loader.sampler.weights = loader.sampler.weights * torch.linspace(0.5, 1.5, 24)


class Labelled(Noisy):
    """Has labels in a list, or in an array."""

    def __init__(self, labels):
        self.labels = labels

    def __getitem__(self, index):
        return X[index], int(self.labels[index])


def relabel(loader):
    loader.dataset.labels[11] = 1 - int(Y[11])


class Large(Task):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows, self.array = torch.zeros(100_000), np.zeros(100_000)
        self.columns, self.part = np.zeros((100, 1000), order="F"), np.zeros((100, 100))[::2, ::2]

    def train_step(self, batch):
        self.rows[12_345] += 1
        self.array[12_345] += 1
        self.columns[50, 500] += 1
        self.part[7, 7] += 1
        return super().train_step(batch)


class OfClass(Task):
    level = 0

    def train_step(self, batch):
        type(self).level += 1
        return super().train_step((batch[0] * self.level, batch[1]))


class Private(Task):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._mean = 0.0

    def train_step(self, batch):
        self._mean += 1.0
        return super().train_step((batch[0] * self._mean, batch[1]))


class Hidden(Sampler):
    """Keeps its weights in a private attribute."""

    def __init__(self):
        self._weights = torch.ones(24)

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(torch.multinomial(self._weights, 24).tolist())


def hide(loader):
    loader.sampler._weights[0] += 1


class Centred(nn.Linear):
    """Keeps a mean in a private attribute."""

    def __init__(self):
        super().__init__(4, 2)
        self._mean = torch.zeros(2)

    def forward(self, x):
        out = super().forward(x)
        self._mean = 0.9 * self._mean + 0.1 * out.detach().mean(0)
        return out - self._mean


class Cached(nn.Module):
    """Builds positions in its first forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.positions = nn.Linear(4, 2), None

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.arange(4.0)
        return self.linear(x + 0.01 * self.positions)


def normed():
    first = nn.utils.weight_norm(nn.Linear(4, 8))
    second = nn.utils.spectral_norm(nn.Linear(8, 8))
    third = nn.Linear(8, 2)
    prune.l1_unstructured(third, "weight", 0.5)
    return nn.Sequential(first, nn.ReLU(), second, third)


class OfLibrary(Task):
    """Reads what a library counts for itself."""

    def train_step(self, batch):
        colorsys.calls = getattr(colorsys, "calls", 0) + 1
        return super().train_step(batch)


class Seeded(Sampler):
    """Sets another attribute than ``epoch`` in ``set_epoch``."""

    def __init__(self):
        self.seed = 0

    def set_epoch(self, epoch):
        self.seed = 100 + epoch

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.seed)).tolist())


class Timed(Task):
    """Measures how long epochs and steps take, and shows it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._began, self._in_epochs, self._step_began, self._lowest = 0.0, 0.0, time.perf_counter(), math.inf

    def on_epoch_begin(self):
        super().on_epoch_begin()
        self._began = time.time()

    def on_step_begin(self, batch):
        super().on_step_begin(batch)
        self._step_began = time.perf_counter()

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        self._lowest = min(self._lowest, time.perf_counter() - self._step_began)

    def on_epoch_end(self):
        super().on_epoch_end()
        self._in_epochs += time.time() - self._began
        self.log({"seconds": self._in_epochs, "step": self._lowest}, self.progress_checker.step)


class Tempered(Task):
    """Changes a private number at the end of an epoch, which a helper of its step reads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._temperature = 1.0

    def train_step(self, batch):
        return super().train_step(self._scaled(batch))

    def _scaled(self, batch):
        return batch[0] * self._temperature, batch[1]

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        self._temperature *= 0.5


PROGRAMS = {
    "weights of a sampler": (lambda: (weighted(WeightedRandomSampler), reweight), {}),
    "epochs of a sampler": (lambda: (loader_of(sampler=Counting(), shuffle=None), None), {}),
    "labels in a list": (lambda: (loader_of(Labelled(Y.tolist() * 9)), relabel), {}),
    "labels in an array": (lambda: (loader_of(Labelled(Y.numpy().copy())), relabel), {}),
    "one entry of many": (lambda: (loader_of(), None), {"task": Large}),
    "a private attribute of a sampler": (lambda: (loader_of(sampler=Hidden(), shuffle=None), hide), {}),
    "a private attribute of a module": (lambda: (loader_of(), None), {"model": Centred}),
    "a private attribute of the task": (lambda: (loader_of(), None), {"task": Private}),
    "an attribute of the task's class": (lambda: (loader_of(), None), {"task": OfClass}),
    "a private number that a helper reads": (lambda: (loader_of(), None), {"task": Tempered}),
    "a cache": (lambda: (loader_of(), None), {"model": Cached}),
    "timers": (lambda: (loader_of(), None), {"task": Timed}),
    "weight_norm, spectral_norm, prune": (lambda: (loader_of(), None), {"model": normed}),
    "a sampler with a state": (lambda: (weighted(Stateful), reweight), {}),
    "set_epoch": (lambda: (loader_of(sampler=Counting(True), shuffle=None), None), {}),
    "what set_epoch sets": (lambda: (loader_of(sampler=Seeded(), shuffle=None), None), {}),
    "a library": (lambda: (loader_of(), None), {"task": OfLibrary}),
    "nothing": (lambda: (loader_of(), None), {}),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_resume_is_exact_and_says_nothing(kind, tmp_path, caplog):
    make, options = PROGRAMS[kind]
    (straight, resumed), said = told(make, tmp_path, caplog, **options)
    assert resumed == straight
    assert not said


def test_another_loader_of_a_later_call_is_not_named(tmp_path, caplog):
    digests = []
    for folder, limits in ((tmp_path / "straight", (None,)), (tmp_path / "parts", (2, None))):
        for limit in limits:
            trainer = trainer_of(folder, Task, lambda: nn.Linear(4, 2))
            trainer.run(1, loader_of(TensorDataset(X[:16], Y[:16])))
            trainer.run(1, loader_of(), max_steps=limit)
        digests.append(hand.digest(trainer.unwrap()))
    assert digests[0] == digests[1]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
