"""Continue a call of `Trainer.run` from another state than the one it has come to, as `Trainer.continue_from` asks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zae.errors import CheckpointMismatch, ConfigError

if TYPE_CHECKING:
    from zae.loop.progress import ProgressChecker
    from zae.trainer import Trainer

__all__ = ["Continuation"]

_MAX_RETURNS = 100  # To one state: what decides to go back goes back as well, and decides so again.


class Continuation:
    """What a call of ``run`` has to do to go on from another state of its own.

    Two ways lead to it. `request` stores a function that loads the state when the present step is done. Or a state was
    loaded between two steps already, which the call sees by its counters: a state brings counters of its own, another
    object than those that the call began with.

    Attributes
    ----------
    is_in_same_call : bool
        Whether the state that the call goes on from was saved within the call.
    """

    def __init__(self, trainer: Trainer, user_loader: Any) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._user_loader = user_loader
        self.is_in_same_call = False
        self._counters: ProgressChecker | None = None
        self._load: Callable[[], None] | None = None
        self._returns: Counter[tuple[int, int]] = Counter()  # To each moment of the run.

    def note_begin(self, is_new_call: bool) -> None:
        """Note that the call has begun, or begun again, with the present counters."""
        self.is_in_same_call = not is_new_call
        self._counters = self._trainer.progress_checker

    def request(self, load: Callable[[], None], state: Mapping[str, Any] | None = None) -> None:
        """Load a state when the present step is done, and continue the call from there."""
        if self._counters is None:
            raise ConfigError(
                "continue_from(...) is for a call of run() that trains, once it has begun; elsewhere load the state: "
                "load_state_dict(state), or load_state(path) of StateManagerAddon"
            )
        self._check_repeatable()
        if state is not None:
            self.check_state(state)
        self._load = load

    @property
    def has_returned(self) -> bool:
        """Whether the call has gone back to an earlier state."""
        return bool(self._returns)

    @property
    def is_requested(self) -> bool:
        """Whether a state is to be loaded when the present step is done."""
        return self._load is not None

    @property
    def is_due(self) -> bool:
        """Whether the call is to continue from another state than it has come to."""
        if self._load is not None:
            return True
        return self._counters is not None and self._counters is not self._trainer.progress_checker

    def apply(self) -> None:
        """Load the state that was asked for, and count the call as one that is to be made again from there."""
        if self._load is not None:
            load = self._load
            self._load = None
            load()
        assert self._counters is not None  # Else nothing is due.
        before = self._counters.run_calls
        counters: ProgressChecker = self._trainer.progress_checker
        self._check_repeatable()
        self.check_state({"progress": counters.state_dict()})
        # A loaded state counts its call as made. `Run.begin` makes it again, as in a script that is started again.
        counters.run_calls.index = before.index - 1
        counters.run_calls.planned_steps = before.planned_steps
        self._refuse_endless_returns(counters)

    def _refuse_endless_returns(self, counters: ProgressChecker) -> None:
        """Refuse to go back to one state without end."""
        moment = (counters.epoch, counters.step)
        self._returns[moment] += 1
        if self._returns[moment] == _MAX_RETURNS:
            raise ConfigError(
                f"this call of run() has gone back to step {counters.step} {_MAX_RETURNS} times. The attributes of "
                "the task go back as well: name what counts the returns, or decides on them, in the class: "
                "unsaved_attributes = ('returns',)"
            )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that was not saved in the present call of ``run``."""
        assert self._counters is not None
        progress = state.get("progress")
        starts = progress.get("run_starts") if isinstance(progress, Mapping) else None
        calls = len(starts) if isinstance(starts, (list, tuple)) else "no known"
        number = self._counters.run_calls.index
        if calls != number:
            raise CheckpointMismatch(
                f"the state is of {calls} calls of run(), and this is call {number}, which continues only from a "
                "state of its own; load that one between two calls: load_state_dict(state), or load_state(path)"
            )

    def _check_repeatable(self) -> None:
        """Refuse to go back in a loader that yields each batch once."""
        if isinstance(self._user_loader, Iterator):
            raise ConfigError(
                f"the loader is a {type(self._user_loader).__name__}, which yields each batch once, so that the run "
                "cannot go back in it; give a DataLoader, a list, or a class with __iter__"
            )
