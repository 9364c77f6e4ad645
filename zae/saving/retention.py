"""Which checkpoints of a run are kept: the newest ones, and the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zae.errors import CheckpointNotFound, MonitorError
from zae.loop.history import split_prefix
from zae.storage.checkpoint import list_checkpoints
from zae.storage.names import original_name, step_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Retention", "best_of", "present_score", "scores_now"]


class Retention:
    """Names of checkpoints with their scores, and the rule that keeps some of them.

    Parameters
    ----------
    last : int or None
        How many of the newest are kept; None keeps all.
    best : int
        How many of the best are kept beside them.
    sign : int
        1 where a smaller score is better, -1 where a larger one is.

    Attributes
    ----------
    scores : dict of str to (float or None)
        The checkpoints that are there, by name.

    Examples
    --------
    >>> kept = Retention(last=1, best=1, sign=1)
    >>> kept.scores = {"step-00000001": 0.5, "step-00000002": 0.7, "step-00000003": 0.6}
    >>> kept.ranked(), kept.doomed()
    (['step-00000001', 'step-00000003', 'step-00000002'], ['step-00000002'])
    """

    def __init__(self, last: int | None, best: int, sign: int) -> None:
        self.last, self.best, self.sign = last, best, sign
        self.scores: dict[str, float | None] = {}

    def ranked(self) -> list[str]:
        """Return those that have a score, best first; of equal ones the older. NaN is no score."""
        scored = [(self.sign * score, name) for name, score in self.scores.items() if score is not None]
        return [name for score, name in sorted(pair for pair in scored if pair[0] == pair[0])]

    def doomed(self) -> list[str]:
        """Return those that neither rule keeps; the newest is never among them."""
        names = sorted(self.scores)
        kept = set(names if self.last is None else names[-self.last :]) | set(self.ranked()[: self.best])
        return [name for name in names if name not in kept]

    def best_in(self, folder: Path) -> Path | None:
        """Return the best of those that are in a folder, where somebody may have removed one."""
        there = _names_in(folder)
        return next((folder / name for name in self.ranked() if name in there), None)

    def take_over(self, scores: Mapping[str, float | None], folder: Path) -> None:
        """Take over what was kept when a state was saved, as far as it is in a folder now."""
        there = _names_in(folder)
        self.scores = {name: score for name, score in scores.items() if name in there}

    def add(self, path: Path, folder: Path) -> None:
        """Keep a checkpoint of a folder that was loaded: its state was saved before it was in its own list."""
        if path.parent == folder and original_name(path.name) in _names_in(folder):
            self.scores.setdefault(original_name(path.name), None)

    def lacks_score(self, name: str, trainer: Trainer) -> bool:
        """Tell whether a checkpoint of the present step was saved before that was validated, and the score counts."""
        is_without = name in self.scores and self.scores[name] is None
        return self.best > 0 and is_without and present_score(trainer) is not None


def _names_in(folder: Path) -> set[str]:
    """The names of the checkpoints in a folder; one that was moved aside counts under its own."""
    return {original_name(path.name) for path in list_checkpoints(folder)}


def scores_now(
    trainer: Trainer, saved: Mapping[str, float | None], state: Mapping[str, Any]
) -> Mapping[str, float | None]:
    """Return the scores of checkpoints as they were saved, or by this trainer's monitor where that is another now.

    Parameters
    ----------
    trainer : Trainer
        Who has loaded the state, and its history.
    saved : mapping of str to (float or None)
        The scores by the checkpoints' names.
    state : mapping
        That they were in.

    Returns
    -------
    mapping of str to (float or None)
        None for those of steps that nothing was measured at.
    """
    if trainer.history.has_criterion_of(state["records"]):
        return saved
    known = trainer.history.scores_by_step()
    return {name: known[step]["score"] if (step := step_of(name)) in known else None for name in saved}


def present_score(trainer: Trainer) -> float | None:
    """Return the monitored metric, when it was measured on the present weights.

    Parameters
    ----------
    trainer : Trainer
        Whose last validation it is, or whose last epoch of training where nothing is validated.

    Returns
    -------
    float or None
        None where it was not measured at this step.
    """
    validates = bool(trainer.valid_history) or trainer.current_run.valid_loader is not None
    by_training = split_prefix(trainer.monitor)[0] == "train" or not validates
    history = trainer.train_history if by_training else trainer.valid_history
    if not history or history[-1]["step"] != trainer.progress_checker.step:
        return None
    return trainer.score_of(trainer.train_metrics if by_training else trainer.test_metrics)


def score_or_none(trainer: Trainer) -> float | None:
    """Return what `present_score` does, or None where no metric has the name ``monitor``.

    Parameters
    ----------
    trainer : Trainer
        Of a run that has failed: its state is saved, whatever the monitor.

    Returns
    -------
    float or None
        The score.
    """
    try:
        return present_score(trainer)
    except MonitorError:
        return None


def best_of(trainer: Any) -> Path:
    """Return the best checkpoint of a run; a run that is still to be gone on with is taken up first, to know it.

    Parameters
    ----------
    trainer : Trainer
        One with the add-on ``StateManagerAddon``.

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    CheckpointNotFound
        No checkpoint of the run has a score, or none is of this run.
    """
    if trainer.best_path is None and trainer.resume is not False:
        with trainer.ready():  # It resumes as it is set up.
            pass
    path: Path | None = trainer.best_path
    if path is not None:
        return path
    folder = trainer.save_path
    if trainer.last_path is None and (older := list_checkpoints(folder)):
        raise CheckpointNotFound(
            f"{folder} holds {len(older)} checkpoints of another run (newest: {older[0].name}), and none of this "
            "trainer; write resume=True to continue that run"
        )
    raise CheckpointNotFound(
        f"no checkpoint in {folder} has a score: no validation returned monitor={trainer.monitor!r}; give run() a "
        "valid_loader, and monitor= the name of a metric that test_step returns"
    )
