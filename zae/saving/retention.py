"""Which checkpoints of a run to keep: the newest ones and the best."""

from __future__ import annotations

__all__ = ["Retention"]


class Retention:
    """The scores of checkpoints by name, and the rule that keeps some of them."""

    def __init__(self, last: int | None, best: int, sign: int) -> None:
        self.last, self.best, self.sign = last, best, sign
        self.scores: dict[str, float | None] = {}

    def best_first(self) -> list[str]:
        """Return the names with a score, best first and of equal ones the older; NaN is not a score."""
        scored = [(self.sign * score, name) for name, score in self.scores.items() if score is not None]
        return [name for score, name in sorted(pair for pair in scored if pair[0] == pair[0])]

    def to_delete(self) -> list[str]:
        """Return the names that neither rule keeps; the newest is never among them."""
        names = sorted(self.scores)
        kept = set(names if self.last is None else names[-self.last :]) | set(self.best_first()[: self.best])
        return [name for name in names if name not in kept]

    def is_unscored(self, name: str) -> bool:
        """Return whether a checkpoint was saved before its score was known, and scores matter."""
        return self.best > 0 and name in self.scores and self.scores[name] is None
