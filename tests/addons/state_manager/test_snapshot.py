"""The copies that a checkpoint in the background is written from; saving itself: tests/addons/test_state_manager.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zae.addons.state_manager.saver import Snapshots


def test_a_snapshot_waits_for_the_devices_that_it_copies_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer on "cuda:1" has not made that the present device: waiting for this one waits for nothing."""
    empty, waited_for, pinned = torch.empty, list[Any](), list[Any]()

    def pageable(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.extend(size if pin_memory else ())  # Torch itself has no device to pin for here.
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *devices: waited_for.append(devices))
    files: dict[str, Any] = {
        "model.safetensors": {"weight": torch.ones(2, 3), "bias": torch.zeros(3)},
        "state.json": b"{}",
    }
    copied = Snapshots().take(files)
    assert waited_for == [(torch.device("cpu"),)]
    assert pinned == [(2, 3), (3,)]
    weights = copied["model.safetensors"]
    assert isinstance(weights, dict)
    assert torch.equal(weights["weight"], torch.ones(2, 3))
    assert copied["state.json"] == b"{}"
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    Snapshots().take(files)
    assert len(waited_for) == 1


def test_the_memory_of_a_snapshot_is_used_for_the_next() -> None:
    """Each copy is whole, to the last byte, and is no other tensor's; what is one tensor stays one."""
    large = torch.arange(3_000_001, dtype=torch.float32)
    tensors = {"a": large, "b": large, "half": large[1::2], "c": large.to(torch.int16)[7:], "wide": large[:1].expand(9)}
    snapshots = Snapshots()
    for _ in range(2):
        copied = copies_of(tensors, snapshots)
        assert all(torch.equal(copied[name], value) for name, value in tensors.items())
        assert copied["a"] is copied["b"]
        held = copied["a"].data_ptr()
        large.add_(1)
        assert not torch.equal(copied["a"], large)
    assert copies_of(tensors, snapshots)["a"].data_ptr() == held


def copies_of(tensors: dict[str, torch.Tensor], snapshots: Snapshots) -> dict[str, torch.Tensor]:
    found = snapshots.take({"state.safetensors": tensors})["state.safetensors"]
    assert isinstance(found, dict)
    return found
