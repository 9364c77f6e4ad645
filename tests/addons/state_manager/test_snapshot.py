"""The copies that a checkpoint in the background is written from; saving itself: tests/addons/test_state_manager.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zae.addons.state_manager import saver
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
    state = {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}, "step": 4}
    copied = Snapshots().take(state)
    assert waited_for == [(torch.device("cpu"),)]
    assert pinned == [(2, 3), (3,)]
    assert torch.equal(copied["model"]["weight"], torch.ones(2, 3))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    Snapshots().take(state)
    assert len(waited_for) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_large_is_copied_piece_by_piece(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, to the last byte, by one thread or several; what is one tensor stays one, and the next save reuses it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    large = torch.arange(3_000_001, dtype=torch.float32)
    snapshots, state = Snapshots(), {"a": large, "b": large, "half": large[1::2], "c": large.to(torch.int16)[7:]}
    for _ in range(2):
        copied = snapshots.take(state)
        assert all(torch.equal(copied[name], value) for name, value in state.items())
        assert copied["a"] is copied["b"]
        held = copied["a"].data_ptr()
        large.add_(1)
        assert not torch.equal(copied["a"], large)
    assert snapshots.take(state)["a"].data_ptr() == held


def test_an_interrupted_copy_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not copied any more is not copied into the memory of the state after it."""
    first, second = torch.zeros(3_000_000), torch.ones(3_000_000)
    snapshots = Snapshots()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saver.np, "copyto", interrupted)
        with pytest.raises(KeyboardInterrupt):
            snapshots.take({"a": first})
    assert torch.equal(snapshots.take({"a": second})["a"], second)
    assert not snapshots._pieces
