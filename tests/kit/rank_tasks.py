"""Tasks, data and a runner for tests in several ranks: spawned processes import them from here by name."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import random
import warnings
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from zae import Trainer

F64 = torch.float64


class Task(Trainer):
    """A regression whose validation keeps its outputs, and a metric over all of them."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    def test_step(self, batch):
        inputs, targets = batch
        output = self.model(inputs)
        return {"loss": nn.functional.mse_loss(output, targets), "output": output}

    def metric_on_epoch_end(self):
        if self.mode == "train":
            return {}
        outputs = torch.cat(self.log_test["output"])
        weights = torch.arange(1, len(outputs) + 1, dtype=outputs.dtype)
        return {"n_seen": len(outputs), "ordered": float(weights @ outputs[:, 0])}


class Counted(Task):
    """The same with the number of its targets."""

    def train_step(self, batch):
        return {**super().train_step(batch), "num_targets": len(batch[0])}


class Seen(Task):
    """The same, noting what is seen in which epoch."""

    seen: dict[int, list[float]]
    unsaved_attributes = ("seen",)  # Of each process by itself.

    def train_step(self, batch):
        self.seen = getattr(self, "seen", {})
        self.seen.setdefault(self.progress_checker.epoch, []).extend(batch[1].view(-1).tolist())
        return super().train_step(batch)


class Says(Task):
    """The same, saying on the last of several ranks how it computes, and starts the workers of its loaders."""

    def on_run_begin(self):
        super().on_run_begin()
        if self.rank:
            print(torch.get_default_dtype(), multiprocessing.get_start_method(), flush=True)


def draw():
    """Draw a number of each random stream of the host."""
    return [torch.rand((), dtype=F64).item(), float(np.random.rand()), random.random()]


class Noisy(Dataset):
    """Samples with random numbers, as an augmentation draws them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index), *draw()], dtype=F64)


class Drawing(Trainer):
    """A regression on `Noisy` that writes the numbers of its samples and of its steps to a file for each rank."""

    place: str

    def train_step(self, batch):
        in_step = draw()
        in_samples = batch[:, 1:].flatten().tolist()
        with open(f"{self.place}-{self.rank}", "a") as file:
            file.write(json.dumps({"in_step": in_step, "own": in_step + in_samples}) + "\n")
        return {"loss": self.model(batch[:, :1].float()).square().mean()}

    test_step = train_step


def network(batch_norm=False, dropout=0.0, dtype=torch.float32):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if batch_norm else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 8), middle, nn.Dropout(dropout), nn.Linear(8, 1)).to(dtype)


def dataset(size, dtype=torch.float32):
    """Inputs, and their index as the target."""
    inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), torch.arange(size, dtype=dtype)[:, None])


def loader(size, batch_size, seed=None, dtype=torch.float32, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset(size, dtype), batch_size, shuffle=seed is not None or None, generator=generator, **options
    )


def build(cls, add_ons=(), device="cpu", model=None, scheduler=None, **options):
    model = network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options.setdefault("log_bar", False)
    made = None if scheduler is None else scheduler(optimizer)
    return cls.add_on(*add_ons)(model, device, optimizer=optimizer, scheduler=made, **options)


def weights(trainer):
    return [value.clone() for value in trainer.unwrap().state_dict().values()]


def same(first, second):
    """Whether two lists of tensors are bitwise the same."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second))


def distance(first, second):
    return max(float((a - b).abs().max()) for a, b in zip(weights(first), weights(second)))


def agree(trainer):
    """Whether all ranks hold the same weights, to the last bit."""
    every = trainer.gather(weights(trainer))
    return all(same(every[0], each) for each in every)


@contextmanager
def forks():
    """Let ranks be forks of this process, which has imported torch, where it is not their beginning that is tested."""
    importlib.import_module("torch._dynamo")  # The first optimizer of a process imports it, which takes as long.
    start = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: start("fork" if method == "spawn" else method)
    try:
        with warnings.catch_warnings():  # Python 3.12 and later warn of a fork beside threads.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            yield
    finally:
        multiprocessing.get_context = start
