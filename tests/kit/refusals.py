"""A small trainer to be given bad input, and what holds of every refusal."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from kit.lines import Task
from zae import Trainer, ZaeError


def data(count=24):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator))


def loader(count=24, **options):
    return DataLoader(data(count), batch_size=8, **options)


def make(cls=Task, **options):
    torch.manual_seed(0)
    model = options.pop("model", None) or torch.nn.Linear(3, 1)
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return cls(model, options.pop("device", "cpu"), **{"log_bar": False, **options})


def stepping(step, name="train_step"):
    return type(Task)("Task", (Task,), {name: step})


def whole(trainer):
    """All that must be as it was: weights, optimizer, counters, history, and every file around."""
    tensors = [*trainer.unwrap().state_dict().values()]
    for optimizer in (trainer.optimizer,) if isinstance(trainer.optimizer, torch.optim.Optimizer) else ():
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    weights = hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()
    progress = trainer.progress_checker.state_dict()
    files = {str(p): p.stat().st_size for p in Path.cwd().rglob("*")}
    return weights, progress, trainer.mode, len(trainer.train_history), len(trainer.log_history), files


@contextlib.contextmanager
def unchanged(trainer):
    """Check that an error of the block leaves the trainer as it was, if it is one of ours."""
    before = whole(trainer)
    try:
        yield
    except ZaeError:
        after = whole(trainer)
        assert after[0] == before[0], "weights or optimizer moved"
        assert after[2:] == before[2:]
        for counter in ("epoch", "step", "batch", "epoch_step", "epoch_batch"):
            assert after[1][counter] == before[1][counter], counter
        raise


def mse(self, batch):
    return mse_loss(self.model(batch[0]), batch[1])


class Bare(Trainer):
    """Returns the loss alone."""

    def train_step(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def test_step(self, batch):
        return self.train_step(batch)


class InADict(Bare):
    def train_step(self, batch):
        return {"loss": super().train_step(batch)}
