"""Checks of what outlasts a step: after an exception, in a checkpoint, and from one run to the next."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from zae.addon import AddOnBase, as_saved
from zae.errors import CheckpointError
from zae.testing import watch
from zae.testing.kit import Kit, Loader, in_new_folder

__all__ = ["check_again", "check_exception", "check_state"]

PLACES = ("setup", "train_step", "step_one", "test_step", "metric_on_epoch_end", "loader")
"""Where code of the user may fail."""

_KINDS = (
    *(ValueError, TypeError, KeyError, IndexError, AssertionError, NotImplementedError, FloatingPointError),
    *(ZeroDivisionError, OverflowError, TimeoutError, MemoryError),
)
Interruption: Any = type("Interruption", _KINDS, {})
"""The exception that a check raises: an instance of every kind that may be caught by name."""


class Stopped(KeyboardInterrupt):
    """A Ctrl-C."""


# ------------------------------------------------------------------------------------------------ after an exception


def check_exception(kit: Kit) -> Iterator[str]:
    """Find resources that an exception leaves behind, and exceptions that do not reach the caller."""
    reported = set[str]()
    for place, error in [*((place, Interruption) for place in PLACES), ("train_step", Stopped)]:
        for kind, fault in _fail(kit, place, error):
            if kind not in reported:
                reported.add(kind)
                yield fault


def _fail(kit: Kit, place: str, error: type[BaseException]) -> Iterator[tuple[str, str]]:
    """Make one run fail; yield the kind of each fault and its text."""
    with in_new_folder():
        before = _resources()
        trainer = kit.make()
        hooks = watch.hooks_of(trainer.unwrap(), [trainer.optimizer])
        raised, changed = _raised_by(kit, trainer, place, error), kit.changes
        yield from _error_faults(place, error, raised) if trainer.notes.has_failed else ()
        for name, how in changed.items():
            if name not in kit.reported:
                kit.reported.add(name)
                yield (
                    name,
                    f"leaves a context open after an exception in {place}: the {name} is not what it was ({how}); "
                    "enter and leave in one generator (with super().forward_context(), mine(): yield)",
                )
        if watch.hooks_of(trainer.unwrap(), [trainer.optimizer]) != hooks:
            yield "hooks", f"leaves hooks behind after an exception in {place}; remove them in teardown()"
        for name, cure in _left_behind(before):
            yield name, f"leaves {name} after an exception in {place}; {cure} in teardown()"


def _raised_by(kit: Kit, trainer: Any, place: str, error: type[BaseException]) -> BaseException | None:
    """Return what a run raises that fails in this place."""
    trainer.notes.fail_in, trainer.notes.error = place, error
    try:
        kit.run(trainer, data=Loader(kit.data(), trainer.notes))
    except (Exception, Stopped) as raised:
        return raised
    return None


def _error_faults(place: str, error: type[BaseException], raised: BaseException | None) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of a fault where a run does not raise what was raised in it."""
    if raised is None:
        name = "a KeyboardInterrupt" if error is Stopped else "an exception"
        yield (
            f"swallows {name}",
            f"swallows {name} of {place}, so the user never learns of it; let it pass, or raise it "
            "again at the end of the except block",
        )
    elif not isinstance(raised, error) and place == "setup":
        yield (
            "fails in teardown",
            f"fails with {type(raised).__name__} where setup() does not end ({raised}): teardown() is called all the "
            "same; set in __init__ what it uses",
        )
    elif not isinstance(raised, error):
        yield (
            f"replaces in {place}",
            f"replaces an exception of {place} with {type(raised).__name__} ({raised}); let the first one pass, and "
            "set in __init__ what teardown() and the end of a context use",
        )


def _resources() -> dict[str, set[Any]]:
    """Return the threads, child processes and open files of this process; files where the system lists them."""
    files = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()
    processes = multiprocessing.active_children()
    return {
        "a thread running": set(threading.enumerate()),
        "a process running": set(processes),
        "a file open": set(files),
    }


_CURES = {"a thread running": "end it", "a process running": "end it", "a file open": "close it"}


def _left_behind(before: dict[str, set[Any]]) -> Iterator[tuple[str, str]]:
    """Yield the resources that are left after up to a second."""
    deadline = time.monotonic() + 1
    while (left := _more_than(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    yield from ((name, _CURES[name]) for name in left)


def _more_than(before: dict[str, set[Any]]) -> list[str]:
    """Return the kinds of new resources; file descriptors are reused, so that only their number counts."""
    now = _resources()
    found = [name for name in now if name != "a file open" and now[name] - before[name]]
    return [*found, *(["a file open"] if len(now["a file open"]) > len(before["a file open"]) else [])]


# ------------------------------------------------------------------------------------------------------ in a state


class KitResumeAddon(AddOnBase):
    """Load a state where a resume does, at the end of setup."""

    layer = "state"

    def __init__(self, *args: Any, kit_state: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kit_state = kit_state

    def setup(self) -> None:
        super().setup()
        if self.kit_state is not None:
            state, self.kit_state = self.kit_state, None
            self.load_state_dict(state)
            self.progress_checker.run_calls.index = 0  # The interrupted call of run continues.


def check_state(kit: Kit) -> Iterator[str]:
    """Find a resumed run that ends differently from an uninterrupted one."""
    whole, bare = kit.standard.trainer, kit.bare.trainer
    known = vars(bare).keys() | set(kit.transient)
    standard = bare.notes.states[0].keys()
    for state in whole.notes.states:
        entries = {key: value for key, value in state.items() if key not in standard}
        faults = list(_entries(kit, entries))
        if not faults:
            resumed, faults = _resume(kit, state, entries)
            faults += _compare(kit, state["progress"]["step"], whole, resumed, known)
        yield from faults
        if faults:
            return


def _entries(kit: Kit, entries: dict[str, Any]) -> Iterator[str]:
    """Find entries that no checkpoint can contain, and those that are not under the name of the add-on."""
    names = {*(c.__name__ for c in kit.own_classes), "generators"}  # The last is AddOnBase.generator's.
    for key, value in entries.items():
        if key not in names:
            yield (
                f"saves its state under {key!r}, where another add-on may save its own; write "
                f"{{**super().state_dict(), {kit.name!r}: ...}}"
            )
        try:
            as_saved(value)
        except CheckpointError as error:
            yield f"has a state that no checkpoint can contain: {error}; return numbers, text, tensors and containers"


def _resume(kit: Kit, state: dict[str, Any], entries: dict[str, Any]) -> tuple[Any, list[str]]:
    """Resume from a state."""
    given = {**copy.deepcopy(state), **{key: as_saved(value) for key, value in entries.items()}}
    before = copy.deepcopy(given)
    with in_new_folder():
        resumed = kit.run(kit.make(add=[KitResumeAddon], kit_state=given))
    faults = []
    if given.keys() != before.keys():
        lost = ", ".join(repr(key) for key in before.keys() - given.keys())
        faults.append(
            f"takes {lost} out of the state that load_state_dict was given, which belongs to the caller; write "
            f"own, rest = self.take(state, {kit.name!r}, strict), and super().load_state_dict(rest, strict)"
        )
    for key in entries.keys() & given.keys():
        found = watch.difference(before[key], given[key], f"state[{key!r}]")
        if found is not None:
            faults.append(
                f"changes the state that it was loaded from: {found} is not what it was when the resumed run ends; "
                "copy what load_state_dict takes: tensor.clone(), list(...)"
            )
    return resumed, faults


def _compare(kit: Kit, step: int, whole: Any, resumed: Any, known: Any) -> Iterator[str]:
    """Find attributes and results that differ between a whole run and a resumed one."""
    lost = [name for name in _differing(whole, resumed) if name not in known]
    if lost:  # A clock differs between any two runs.
        with in_new_folder():
            clocks = set(_differing(whole, kit.run(kit.make())))
        lost = [name for name in lost if name not in clocks]
    for name in lost:
        a, b = vars(whole)[name], vars(resumed).get(name)
        yield (
            f"keeps undeclared state: self.{name} is {a!r:.60} after a whole run, and {b!r:.60} after one resumed at "
            f"step {step}; declare state_attributes = ({name!r},), or add it to state_dict() and load_state_dict() "
            f"under the key {kit.name!r}, or name it in transient= when no resume needs it"
        )
    for part, found in list(watch.differing_parts(whole, resumed))[: not lost]:
        yield f"does not resume: saved at step {step}, the {part} ends as another ({found}); save what it needs"


def _differing(a: Any, b: Any) -> list[str]:
    """Name the attributes that differ between two trainers."""
    return [name for name, value in vars(a).items() if watch.difference(value, vars(b).get(name)) is not None]


def check_again(kit: Kit) -> Iterator[str]:
    """Find what is lost between two calls of ``run``, unless the add-on acts when a run ends."""
    if any("on_run_end" in klass.__dict__ for klass in kit.own_classes):
        return
    trainer = kit.run(kit.run(kit.make(), 1), 1)
    for part, found in list(watch.differing_parts(kit.standard.trainer, trainer))[:1]:
        yield (
            f"forgets something between two calls of run: run(1) and run(1) end with another {part} than run(2) "
            f"({found}); do not reset in setup(), on_run_begin() or teardown() what the next call needs"
        )
