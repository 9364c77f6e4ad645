"""Accelerators share one state in a process, which outlives the test that has made one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fresh_state() -> Iterator[None]:
    """Forget the Accelerators of other tests, and then those of this one."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
