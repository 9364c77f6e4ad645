"""The rule that keeps some of the checkpoints of a run: the newest, and the best by their scores."""

from __future__ import annotations

__all__ = ["Retention"]


class Retention:
    """The scores of checkpoints, or of files of weights, by name, and which of them stay.

    Parameters
    ----------
    last : int or None
        How many of the newest stay; None keeps all.
    best : int
        How many of the best stay beside them.
    direction : {"min", "max"}
        Whether the best has the smallest or the largest score.

    Attributes
    ----------
    scores : dict
        The score of each name; None where it was not validated.
    """

    def __init__(self, last: int | None, best: int, direction: str) -> None:
        self.last = last
        self.best = best
        self.scores: dict[str, float | None] = {}
        self._sign = 1 if direction == "min" else -1

    def __str__(self) -> str:
        if self.last is None:
            return "all are kept"
        best = f" and the best {self.best}" if self.best > 0 else ""
        return f"the newest {self.last}{best} are kept"

    def is_better(self, score: float, other: float) -> bool:
        """Return whether a score is better than another one."""
        return self._sign * score < self._sign * other

    def best_first(self) -> list[str]:
        """Return the names with a score, best first and of equal ones the older; NaN is not a score."""
        scored = [(self._sign * score, name) for name, score in self.scores.items() if score is not None]
        return [name for score, name in sorted(pair for pair in scored if pair[0] == pair[0])]

    def to_delete(self) -> list[str]:
        """Return the names that neither rule keeps; the newest is never among them."""
        if self.last is None:
            return []
        names = sorted(self.scores)
        names_kept = {*names[-self.last :], *self.best_first()[: self.best]}
        return [name for name in names if name not in names_kept]

    def is_unscored(self, name: str) -> bool:
        """Return whether a checkpoint was saved before its score was known, and scores matter."""
        return self.best > 0 and name in self.scores and self.scores[name] is None

    def wants(self, name: str, is_scored: bool, is_best: bool) -> bool:
        """Return whether to save what was just validated: to note its score, or because it is the best so far."""
        return (is_scored and self.is_unscored(name)) or (is_best and self.best > 0 and self.best_first()[:1] != [name])
