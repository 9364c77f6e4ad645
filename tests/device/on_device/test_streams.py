"""Copies beside the computation: nothing reads or frees memory too early, and the bits are those without them."""

from __future__ import annotations

import pytest
import torch

from device.on_device.compositions import Blocks
from device.on_device.tasks import DEVICE, Task, adamw, assert_same, dense, loader, weights
from emulation import core
from emulation.record import record
from zae.addons import ActivationOffloadAddon, PrefetchAddon

LOADERS = {
    "workers": {"num_workers": 1},
    "pinned": {"num_workers": 1, "pin_memory": True},
    "pinned_persistent": {"num_workers": 1, "pin_memory": True, "persistent_workers": True},
}


def train(make_model, addons=(), options=None, **loading):
    """Train two epochs with a valid loader, and return the weights and what was done too early."""
    record.clear()
    torch.manual_seed(0)
    trainer = Task.add_on(*addons)(make_model(), DEVICE, optimizer=adamw, seed=0, **(options or {}))
    trainer.run(2, loader(**loading), loader(**loading))
    core().check_watches()
    violations = list(record.violations)
    record.clear()
    return weights(trainer.model), violations


@pytest.mark.parametrize("loading", LOADERS)
def test_prefetching_is_without_races(loading):
    plain, _ = train(dense, **LOADERS[loading])
    prefetched, violations = train(dense, (PrefetchAddon,), **LOADERS[loading])
    assert not violations
    assert_same(prefetched, plain)


@pytest.mark.parametrize("pinned", [True, False])
def test_offloading_is_without_races(pinned):
    plain, _ = train(Blocks)
    options = {"offload_min_bytes": 1, "offload_pinned": pinned}
    offloaded, violations = train(Blocks, (ActivationOffloadAddon,), options)
    assert not violations
    assert_same(offloaded, plain)


def test_a_race_is_found(monkeypatch):
    """The check can fail: without `record_stream`, memory is freed while a stream uses it."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    _, violations = train(dense, (PrefetchAddon,), num_workers=1, pin_memory=True)
    assert any("no record_stream" in line for line in violations)
