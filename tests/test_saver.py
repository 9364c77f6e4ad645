"""The copies that a checkpoint in the background is written from; saving itself: tests/addons/test_state_manager.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zae.saver import Snapshots


def test_p54_a_snapshot_waits_for_the_devices_that_it_copies_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer on "cuda:1" has not made that the present device: waiting for this one waits for nothing."""
    empty, waited_for, pinned = torch.empty, list[Any](), list[Any]()

    def pageable(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.extend(size if pin_memory else ())  # Torch itself has no device to pin for here.
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *devices: waited_for.append(devices))
    state = {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}, "step": 4}
    copied = Snapshots().take(state)
    assert waited_for == [(torch.device("cpu"),)]
    assert pinned == [(2, 3), (3,)]
    assert torch.equal(copied["model"]["weight"], torch.ones(2, 3))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    Snapshots().take(state)
    assert len(waited_for) == 1
