"""Time several ways to make a training step, in turn, and keep the fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from statistics import median, quantiles
from typing import Any

import torch

from zae.compiling.compiler import synchronize

__all__ = ["Benchmark"]

_log = logging.getLogger("zae")
_WARM_UP = 10  # Steps of each way that do not count: compilation, cold caches.
_COUNTED, _MOST = 10, 100  # Steps of each way that count: at least, and at most.
_SECONDS = 0.1  # Short steps are repeated until so many seconds are measured.
_LEAST_GAIN = 0.02  # As a part of the eager step.


class Benchmark:
    """The times of steps that are made in several ways, in turn."""

    def __init__(self, ways: Iterable[str]) -> None:
        self._times: dict[str, list[float]] = {way: [] for way in ways}
        self._began = 0.0

    def start(self, device: torch.device) -> str:
        """Begin to time a step, and return the way to make it."""
        synchronize(device)
        self._began = time.perf_counter()
        return self.next_way

    def stop(self, way: str, device: torch.device, report: dict[str, Any]) -> None:
        """Add the time of the step that was started, and decide where the times are enough."""
        if self._began:
            synchronize(device)
            self.record(way, time.perf_counter() - self._began)
            self._began = 0.0
            self.decide(report)

    @property
    def next_way(self) -> str:
        """The way to make the next step."""
        return min(self._times, key=lambda way: len(self._times[way]))

    def record(self, way: str, seconds: float) -> None:
        """Add the time of a step."""
        self._times[way].append(seconds)

    def remove(self, way: str) -> None:
        """Continue without a way that the compiler refused."""
        self._times.pop(way, None)

    def decide(self, report: dict[str, Any]) -> bool:
        """Return whether there are enough times; if so, write "kept", "seconds" and "breakeven_steps" into the report.

        Each step is compared with the eager step of its turn, because the load of a machine changes. A gain within the
        scatter of these differences is a tie, and a tie keeps the eager step.
        """
        counted = {way: times[_WARM_UP:] for way, times in self._times.items()}
        count = min(map(len, counted.values()))
        if count < _COUNTED or (count < _MOST and sum(counted["eager"]) < _SECONDS):
            return False
        seconds = {way: median(times) for way, times in counted.items()}
        gains = {way: [a - b for a, b in zip(counted["eager"], times)] for way, times in counted.items()}
        best = max(gains, key=lambda way: median(gains[way]))
        gain = median(gains[best])
        if gain <= max(2 * _standard_error(gains[best]), _LEAST_GAIN * seconds["eager"]):
            best = "eager"
        breakeven = int(report["compile_seconds"] / gain) + 1 if best != "eager" else None
        report |= {"kept": best, "seconds": seconds, "breakeven_steps": breakeven}
        shown = ", ".join(f"{each:.3g} s {way}" for way, each in seconds.items())
        _log.info("compile_mode='auto' keeps the step %r: %s; compiled in %.1f s, %d graphs, %s steps to break even",
                  best, shown, report["compile_seconds"], report["graphs"], breakeven)  # fmt: skip
        return True


def _standard_error(times: list[float]) -> float:
    """Return the standard error of a median from the interquartile range, which outliers do not change."""
    low, _, high = quantiles(times, n=4)
    return 0.93 * (high - low) / len(times) ** 0.5
