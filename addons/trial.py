"""A trial of several ways to make a step: each is timed in turn, and the fastest is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from statistics import median, quantiles
from typing import Any

__all__ = ["Trial"]

_log = logging.getLogger("zae")
_EACH = 20  # Steps of each way that are timed; the first half, in which everything warms up, does not count.
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

        What is no faster than the scatter of the times is a tie, and a tie keeps the eager step.

        Parameters
        ----------
        report : dict
            Has "compile_seconds" and "graphs", and is given "seconds", "kept" and "pays_after".

        Returns
        -------
        bool
            Whether it is decided.
        """
        if min(map(len, self._times.values())) < _EACH:
            return False
        counted = {way: times[_EACH // 2 :] for way, times in self._times.items()}
        seconds = {way: median(times) for way, times in counted.items()}
        eager = seconds["eager"]
        best = min(seconds, key=lambda way: seconds[way])
        gain = eager - seconds[best]
        scatter = (_error(counted["eager"]) ** 2 + _error(counted[best]) ** 2) ** 0.5
        slower = min(counted[best]) >= min(counted["eager"])
        if slower or gain <= max(2 * scatter, _LEAST * eager):
            best = "eager"
        pays = int(report["compile_seconds"] / gain) + 1 if best != "eager" else None
        report |= {"kept": best, "seconds": seconds, "pays_after": pays}
        shown = ", ".join(f"{each:.3g} s {way}" for way, each in seconds.items())
        _log.info("compile_mode='auto' keeps the step %r: %s; compiled in %.1f s, %d graphs, pays after %s steps",
                  best, shown, report["compile_seconds"], report["graphs"], pays)  # fmt: skip
        return True


def _error(times: list[float]) -> float:
    """The standard error of a median, by the middle half of the times: single ones are off by far on a busy machine."""
    low, _, high = quantiles(times, n=4)
    return 0.93 * (high - low) / len(times) ** 0.5
