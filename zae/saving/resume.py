"""What a run resumes from, and what its script has done since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from zae.common.argument_checks import check_flags, check_partial
from zae.data.position import LoaderPosition
from zae.errors import CheckpointMismatch, ConfigError, did_you_mean
from zae.loop.progress import ProgressChecker, RunCalls
from zae.saving.checkpointer import Content
from zae.saving.rank_states import RankStates
from zae.saving.start_from import Start
from zae.saving.unsaved import Unsaved

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["Resumption"]

_log = logging.getLogger("zae")


class Resumption:
    """The options of a resume, the checkpoint that it found, and when it is due.

    A script that is started again makes all its calls of ``run``. Those that were over when its state was saved do
    nothing, but what stands between them is executed again, ``restore_best()`` or another learning rate for instance:
    on the state of a later call. Before that call continues, the state is loaded again.
    """

    def __init__(
        self, resume: bool | str | Path, mid_epoch: str, reshard: bool, allow_partial: Collection[str], start: Start
    ) -> None:
        if not isinstance(resume, (bool, str, Path)) or resume == "":
            raise ConfigError(f"resume={resume!r}; it must be False, True, 'auto' or the path of a checkpoint")
        name = resume if isinstance(resume, str) else ""
        hint = did_you_mean(name, ("auto", "True", "False")) if name != "auto" else ""
        if hint and not Path(name).expanduser().exists():
            hint = hint.replace("'True'", "True").replace("'False'", "False")
            raise ConfigError(f"resume={resume!r} is not the path of a checkpoint{hint}")
        if mid_epoch not in ("skip", "restart"):
            raise ConfigError(f"mid_epoch={mid_epoch!r}; it must be 'skip' or 'restart'")
        if check_partial(allow_partial) and resume in (False, True, "auto"):
            raise ConfigError("allow_partial is for one checkpoint that is known to be damaged; give resume=<its path>")
        (self.reshard,) = check_flags(reshard=reshard)
        self.resume, self.mid_epoch, self.allow_partial = resume, mid_epoch, check_partial(allow_partial)
        self.start, self.unsaved = start, Unsaved()
        self.path: Path | None = None
        self.news = ""
        self._calls = 0  # Calls of run in the state that was resumed from.
        self._is_done = self._is_left = False

    def begin_from(self, resume: bool | str | Path) -> None:
        """Resume from a checkpoint when the trainer is set up, as with the option ``resume``."""
        if self._is_done and resume is not False:
            raise ConfigError(
                f"resume from {resume!r} comes after a call of run(), which has begun already; make a new trainer, or "
                "load the state: load_state(path)"
            )
        self.resume = resume

    def is_due(self, calls: RunCalls, is_seeded: bool) -> bool:
        """Return whether to look for a checkpoint: once, as the trainer is set up for the first time."""
        # Calls that other processes have made for this one count; what they resumed from is not known here.
        is_begun = self._is_done or (is_seeded and calls.index > 0 and not calls.is_behind)
        self._is_done = True
        return not is_begun

    def note_resumed(self, path: Path, calls: RunCalls) -> None:
        """Note the checkpoint that was resumed from, with the calls of ``run`` in its state."""
        self.path, self._calls = path, len(calls.starts)

    def take_news(self, run: Run, shown: Callable[[Path], str]) -> str:
        """Return what to say as a call of ``run`` begins: where it continues, or that it is finished already.

        Each sentence is returned once; ``shown`` returns a path as it is shown.
        """
        news, self.news = self.news, ""
        calls = run.trainer.progress_checker.run_calls
        if self.path is None or calls.index > self._calls:  # A new call.
            return news
        if calls.is_behind:
            return f"call {calls.index} of run() was finished before; nothing to train"
        is_regular = self.path.name.startswith("step-")
        where = shown(self.path.parent if is_regular else self.path)
        if run.trainer.progress_checker.pending_validation or run.has_more_epochs():
            return f"resumed from {run.place} of {where}"
        reason = run.trainer.progress_checker.stop_reason
        because = f", stopped: {reason}" if reason else ""
        return f"already finished; nothing to train: {where} is at {run.place}{because}"

    def is_ahead(self, calls: RunCalls) -> bool:
        """Return whether the state belongs to a call of ``run`` that the script has not made yet."""
        return self.path is not None and calls.is_behind

    def leave(self, calls: RunCalls) -> None:
        """Note, as the trainer is torn down, that the script may change it from now on."""
        self._is_left = self.is_ahead(calls)

    def must_reload(self, calls: RunCalls) -> Path | None:
        """Return the checkpoint if the script may have changed its state before the call of ``run`` that continues."""
        if not self._is_left or calls.is_behind:
            return None
        self._is_left = False
        return self.path

    def skip_save(self) -> Path:
        """Return the checkpoint that a save between two calls of ``run`` would overwrite with an earlier state."""
        assert self.path is not None
        _log.info("not saved: %s holds the state of a later call of run(), and is loaded again for it", self.path)
        return self.path

    def restart_epoch(self, progress: ProgressChecker, position: LoaderPosition) -> None:
        """With ``mid_epoch="restart"``, begin an open epoch again at its first batch, from the present weights."""
        if self.mid_epoch != "restart" or not progress.epoch_batch:
            return
        _log.warning(
            "epoch %d begins again at its first batch (mid_epoch='restart'): the %d batches that were used come a "
            "second time", progress.epoch + 1, progress.epoch_batch,
        )  # fmt: skip
        position.restart(progress.batch)
        progress.epoch_step = progress.epoch_batch = 0

    def check_ranks(self, found: Path, content: Content, processes: int, shares: int) -> None:
        """Refuse a checkpoint of another number of shares of the data, unless ``reshard`` is set."""
        saved, divided = content[0]["world_size"], RankStates.any_in(content[2]).world_size
        if divided == shares or self.reshard or not content[2]:
            return
        one, other = f"by {saved} processes", f"{processes}"
        if saved != divided or processes != shares:
            one, other = f"{one} with {divided} shares of the data", f"{other} with {shares}"
        raise CheckpointMismatch(
            f"checkpoint {found} was saved {one}; this run has {other}; use as many processes, write reshard=True to "
            "reshard the rest of the epoch, or load only the weights: apply_weights(path)"
        )
