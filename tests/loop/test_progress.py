"""Counters and cadences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zae import ConfigError, Every, ProgressChecker
from zae.errors import CheckpointMismatch


@given(n=st.integers(1, 50), after=st.integers(0, 20))
def test_every_is_due_at_its_multiples(n: int, after: int) -> None:
    steps, epochs = Every(steps=n, after=after), Every(epochs=n, after=after)
    due = [i for i in range(1, 101) if i % n == 0 and i > after]
    assert [i for i in range(1, 101) if steps.due_at_step(i)] == due
    assert [i for i in range(1, 101) if epochs.due_at_epoch(i)] == due
    assert not any(steps.due_at_epoch(i) or epochs.due_at_step(i) for i in range(1, 101))


@pytest.mark.parametrize(
    "options", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"steps": -1}, {"epochs": 1.0}, {"steps": True},
                {"steps": 1, "after": -1}],
)  # fmt: skip
def test_a_cadence_that_cannot_be_meant(options: Any) -> None:
    with pytest.raises(ConfigError, match="Every"):
        Every(**options)


@pytest.mark.parametrize("value", [0, -3, 2.5, "1", True, [1]])
def test_what_is_no_cadence(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"save_every=.*; write Every\(steps=\.\.\.\)"):
        Every.parse(value, "save_every", Every(epochs=1))


def test_a_number_means_steps_and_none_the_default() -> None:
    assert Every.parse(3, "x", Every(epochs=1)) == Every(steps=3)
    assert Every.parse(None, "x", Every(epochs=1)) == Every(epochs=1)
    assert Every.parse(Every(epochs=2), "x", Every(epochs=1)) == Every(epochs=2)


@given(windows=st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans())))
def test_the_counters_add_up(windows: Any) -> None:
    """Steps, batches, skipped steps, and the same within the epoch; a round trip keeps them."""
    progress = ProgressChecker()
    open_windows: list[int] = []
    for batches, skipped, ends in windows:
        progress.advance(batches, skipped)
        open_windows.append(batches)
        if ends:
            progress.close_epoch()
            open_windows.clear()
    assert progress.step == len(windows)
    assert progress.batch == sum(batches for batches, _, _ in windows)
    assert progress.skipped_steps == sum(skipped for _, skipped, _ in windows)
    assert (progress.epoch_step, progress.epoch_batch) == (len(open_windows), sum(open_windows))
    twin = ProgressChecker()
    twin.load_state_dict(progress.state_dict())
    assert twin == progress
    twin.run_starts.append([1, 1])
    assert progress.run_starts != twin.run_starts


@pytest.mark.parametrize("change", [{"step": None}, {"epoch": "1"}, {"batch": 1.5}])
def test_a_state_of_something_else_is_refused_whole(change: Any) -> None:
    progress = ProgressChecker()
    state = {**progress.state_dict(), "epoch": 5, **change}
    for bad in (state, {"epoch": 5}):
        with pytest.raises(CheckpointMismatch, match="no valid"):
            progress.load_state_dict(bad)
        assert progress == ProgressChecker()
