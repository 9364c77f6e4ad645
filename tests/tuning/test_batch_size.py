"""find_batch_size: the same samples in a step, under a real limit of memory."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import zae
from kit.hand import digest, loader, network
from kit.scripts import Script
from kit.table import Task
from zae import ConfigError
from zae.addons import GradientAccumulationAddon

LIMITED = """
import json, torch, zae
from kit.limits import leave_memory
from torch.utils.data import DataLoader, TensorDataset

class Wide(zae.Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch[0]).sigmoid().mean()}
    test_step = train_step

trainer = Wide(torch.nn.Linear(1, 500_000), "cpu", optimizer=torch.optim.SGD, log_bar=False)
batches = DataLoader(TensorDataset(torch.ones(256, 1)), 256)
zae.find_batch_size(trainer, batches, effective_batch_size=1)
before = [p.clone() for p in trainer.model.parameters()]
held = leave_memory(400 << 20)
found = zae.find_batch_size(trainer, batches)
same = all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
trainer.run(1, DataLoader(batches.dataset, found.micro_batch_size), max_steps=1)
print(json.dumps([found.micro_batch_size, found.gradient_accumulation_steps, found.tried, same]))
"""


def test_a_limit_of_memory_divides_the_batch() -> None:
    status, out, err = Script(LIMITED).end()
    assert status == 0, err
    size, count, tried, same = json.loads(out)
    assert same
    assert size * count == 256
    assert 1 <= size < 256
    assert tried["256"] is False
    assert tried[str(size)] is True
    assert tried.get(str(size * 2)) is False


def faulty(limit: int, error: Exception) -> Any:
    class Faulty(Task):
        def train_step(self, batch: Any) -> Any:
            if len(batch[0]) > limit:
                raise error
            return super().train_step(batch)

    return Faulty


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_accumulation_keeps_the_samples_in_a_step(error: Exception) -> None:
    task = faulty(7, error).add_on(GradientAccumulationAddon)
    model, batches = network(), loader(60, 12)
    trainer = task(model, "cpu", optimizer=torch.optim.AdamW, gradient_accumulation_steps=2, log_bar=False)
    before, random = digest(model), torch.get_rng_state()
    found = zae.find_batch_size(trainer, batches)
    assert (found.micro_batch_size, found.gradient_accumulation_steps, found.effective_batch_size) == (6, 4, 24)
    assert found.tried == {24: False, 4: True, 8: False, 6: True}
    assert str(found).startswith("batch_size=6, gradient_accumulation_steps=4: 24 samples a step; tried: 24 does not")
    assert digest(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.gradient_accumulation_steps == 2
    assert trainer.progress_checker.step == 0


def test_what_cannot_be_found_is_refused() -> None:
    def refused(text: str, task: Any, batches: Any) -> None:
        trainer = task(network(), "cpu", optimizer=torch.optim.AdamW, log_bar=False)
        with pytest.raises(ConfigError, match=re.escape(text)):
            zae.find_batch_size(trainer, batches)

    refused("one sample alone does not fit in memory", faulty(0, MemoryError()), loader())
    refused("give a DataLoader with batch_size=...", Task, [*loader()])
    refused("give a DataLoader with batch_size=...", Task, DataLoader(TensorDataset(torch.ones(4)), batch_size=None))
    with pytest.raises(RuntimeError, match="another fault"):
        zae.find_batch_size(
            faulty(0, RuntimeError("another fault"))(network(), "cpu", optimizer=torch.optim.AdamW, log_bar=False),
            loader(),
        )
