"""Limits on what hostile input may cost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

__all__ = ["within"]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail where the processor works for longer, or where something waits for ever.

    The limit is many times what is needed, and a small part of what a step for each pair of bytes would take.
    """

    def stop(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(600)
    begun = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begun < seconds
