"""A trial of several ways to make a step: each is timed in turn, and the fastest is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from statistics import median, quantiles
from typing import Any

__all__ = ["Trial"]

_log = logging.getLogger("zae")
_WARM = 10  # Steps of each way that do not count: something is compiled, and caches fill.
_COUNTED, _MOST = 10, 100  # At least and at most so many do, and so many seconds: short steps need more of them.
_SECONDS = 0.1
_LEAST = 0.02  # A smaller part of the eager step is no gain.


class Trial:
    """The seconds of steps that are made in several ways, one by one in turn.

    Parameters
    ----------
    ways : iterable of str
        "eager" and others.

    Examples
    --------
    >>> trial, report = Trial(["eager", "graph"]), {"compile_seconds": 6.0, "graphs": 1}
    >>> while not trial.judge(report):
    ...     trial.note(trial.turn, 3.0 if trial.turn == "eager" else 1.0)
    >>> report["kept"], report["seconds"], report["pays_after"]
    ('graph', {'eager': 3.0, 'graph': 1.0}, 4)
    """

    def __init__(self, ways: Iterable[str]) -> None:
        self._times: dict[str, list[float]] = {way: [] for way in ways}

    @property
    def turn(self) -> str:
        """The way that the next step is to be made."""
        return min(self._times, key=lambda way: len(self._times[way]))

    def note(self, way: str, seconds: float) -> None:
        """Take the time of a step."""
        self._times[way].append(seconds)

    def leave_out(self, way: str) -> None:
        """Go on without a way that turned out not to be one."""
        self._times.pop(way, None)

    def judge(self, report: dict[str, Any]) -> bool:
        """Decide, once there are enough times of each way, and say what was found.

        Each step is compared with the eager one of its turn, for a machine is not always equally busy. A gain within
        the scatter of these differences is a tie, and a tie keeps the eager step.

        Parameters
        ----------
        report : dict
            Has "compile_seconds" and "graphs", and is given "seconds", "kept" and "pays_after".

        Returns
        -------
        bool
            Whether it is decided.
        """
        counted = {way: times[_WARM:] for way, times in self._times.items()}
        count = min(map(len, counted.values()))
        if count < _COUNTED or (count < _MOST and sum(counted["eager"]) < _SECONDS):
            return False
        seconds = {way: median(times) for way, times in counted.items()}
        gains = {way: [a - b for a, b in zip(counted["eager"], times)] for way, times in counted.items()}
        best = max(gains, key=lambda way: median(gains[way]))
        gain = median(gains[best])
        if gain <= max(2 * _error(gains[best]), _LEAST * seconds["eager"]):
            best = "eager"
        pays = int(report["compile_seconds"] / gain) + 1 if best != "eager" else None
        report |= {"kept": best, "seconds": seconds, "pays_after": pays}
        shown = ", ".join(f"{each:.3g} s {way}" for way, each in seconds.items())
        _log.info("compile_mode='auto' keeps the step %r: %s; compiled in %.1f s, %d graphs, pays after %s steps",
                  best, shown, report["compile_seconds"], report["graphs"], pays)  # fmt: skip
        return True


def _error(times: list[float]) -> float:
    """The standard error of a median, by the middle half: on a busy machine single times are off by far."""
    low, _, high = quantiles(times, n=4)
    return 0.93 * (high - low) / len(times) ** 0.5
