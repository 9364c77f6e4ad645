"""The checks of an add-on: each is given a `Kit`, and yields what is wrong with its remedy."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from zae.addon import as_saved
from zae.compose.introspect import is_engine_slot, is_marked
from zae.errors import CheckpointError
from zae.parts import SingleProcess
from zae.testing import watch
from zae.testing.kit import Kit, Loader, in_new_folder
from zae.trainer import Trainer

__all__ = ["ALL"]

CLIP = 0.01
"""The norm that the check of clipping clips gradients to."""

FIXED = ("run", "run_epoch", "run_batch", "evaluate", "inference", "predict", "_run")

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


# ------------------------------------------------------------------------------------------------ the class


def check_class(kit: Kit) -> Iterator[str]:
    """Find an override of the loop, and a missing docstring."""
    cls = kit.task.add_on(kit.add_on, *kit.beside)
    for name in FIXED:
        if getattr(cls, name) is not getattr(kit.task, name):
            yield f"replaces {name}, which is the loop itself; override a hook inside it instead (see zae.AddOnBase)"
    if not (kit.add_on.__doc__ or "").strip():
        yield "has no docstring; write what it does in one line: explain() and help() show it"


def check_pickle(kit: Kit) -> Iterator[str]:
    """Find what cannot be pickled, before a trainer is set up and after a run."""
    for moment in ("before a run", "after a run"):
        with in_new_folder():
            trainer = kit.make(kit.task)
            if moment == "after a run":
                kit.run(trainer, 1)
            try:
                restored = pickle.loads(pickle.dumps(trainer))
            except Exception as error:
                yield (
                    f"cannot be pickled {moment} ({type(error).__name__}: {error}), so no process can be started "
                    "with it; keep no lambda, open file, lock or class of a function in an attribute beyond "
                    "teardown(), or name it in process_attributes"
                )
                return
            if type(restored) is not type(trainer):
                yield "becomes another class when it is pickled; define the add-on at the top of a module"


def check_super(kit: Kit) -> Iterator[str]:
    """Count the calls of ``super()`` of each override in a run; find those that make none, or several."""
    outer = kit.own_hooks
    names = set(outer.values())
    inner = {f"{name} of Trainer": getattr(Trainer, name) for name in names}
    codes = {_code(value): name for name, value in inner.items()}
    broken: Exception | None = None
    with watch.Calls({**outer, **codes}) as calls:
        try:
            kit.run(kit.make()).describe()  # No run calls describe(): plan() and loggers do.
        except Exception as error:  # Often because super() was not called, which is reported below.
            broken = error
    if broken is None and not any(calls.count[name] for name in names):
        yield from _without_calls(kit, sorted(names))
    faults = [fault for name in sorted(names) if (fault := _compare_calls(kit, name, outer, calls, broken is not None))]
    if broken is not None and not faults:
        raise broken
    yield from faults


def _without_calls(kit: Kit, names: list[str]) -> Iterator[str]:
    """Find an add-on that the loop has not called, of which the other checks have seen nothing."""
    methods = [n for c in kit.own_classes for n, value in vars(c).items() if inspect.isfunction(value) and n[0] != "_"]
    if names:
        yield (
            f"has hooks of which none ran in two epochs with validations: {', '.join(names)}; nothing else was "
            "checked. Give options with which they run, or test it by a run of your own, with allow=['super']"
        )
    elif methods:
        yield (
            f"overrides no hook, so that the loop never calls it: {', '.join(methods)}; look for a misspelt name "
            "(zae.AddOnBase lists the hooks). Where users call these methods: allow=['super']"
        )


def _compare_calls(kit: Kit, name: str, outer: dict[Any, str], calls: watch.Calls, broken: bool) -> str | None:
    """Compare how often an override was called with how often it called ``super()``."""
    owners = [c for c in kit.add_on.__mro__ if name in c.__dict__]
    if any(is_marked(owner.__dict__[name], "__replaces__") for owner in owners):
        return None
    overrides = [code for code, known in outer.items() if known == name]
    count = calls.count[name] / max(1, len(overrides))
    reached = calls.count[f"{name} of Trainer"]
    if reached < count - broken:  # A call that raised has not reached it either.
        return (
            f"forgets super().{name}(): of {count:g} calls of {name}, {reached} reached what is inside; call it on "
            "every path, or mark the method with @zae.replaces"
        )
    if reached > count and not any(is_marked(owner.__dict__[name], "__repeats__") for owner in owners):
        return (
            f"calls super().{name}() more than once: {reached} times in {count:g} calls; call it once, or mark the "
            "method with @zae.repeats"
        )
    return None


def _code(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else value
    return getattr(value, "__wrapped__", value).__code__


# ------------------------------------------------------------------------------------------------ the steps


def check_clip(kit: Kit) -> Iterator[str]:
    """Find gradients larger than ``gradient_clip`` that reach the optimizer."""
    with in_new_folder():
        norms = kit.run(kit.make(gradient_clip=CLIP)).notes.norms
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    if largest > CLIP * 1.001:
        yield (
            f"drops clipping: with gradient_clip={CLIP}, a gradient of norm {largest:.3g} reached the optimizer; call "
            "super().clip(), and change gradients before it (in clip or unscale), not after"
        )


def check_mode(kit: Kit) -> Iterator[str]:
    """Find steps that run with the model in the wrong mode."""
    trainer = kit.standard
    for step, training in dict.fromkeys(trainer.notes.modes):
        if training != (step == "train_step"):
            yield (
                f"changes model.training: it is {training} inside {step}; put it back where you change it (in a "
                "context: try, yield, finally)"
            )
    if not trainer.unwrap().training:
        yield "changes model.training: it is False after a run in mode 'train'; put it back where you change it"


def check_random(kit: Kit) -> Iterator[str]:
    """Find draws from training's random streams."""
    usual = kit.bare.notes.streams
    present = kit.standard.notes.streams
    drawn = [name for name in present if watch.difference(present[name], usual[name]) is not None]
    if drawn:
        yield (
            f"draws from the global random stream {drawn[0]!r}, and so changes training: a run ends with another state "
            "of it; draw from self.generator(name), or inside zae.random_state.isolated()"
        )


# ------------------------------------------------------------------------------------------------- after an exception


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
        threads = set(threading.enumerate())
        trainer = kit.make()
        hooks = watch.hooks_of(trainer.unwrap(), [trainer.optimizer])
        trainer.notes.fail_in = place
        trainer.notes.error = error
        raised = None
        try:
            kit.run(trainer, data=Loader(kit.data(), trainer.notes))
        except (Exception, Stopped) as failure:
            raised = failure
        changed = kit.changes
        yield from _error_faults(place, error, raised) if trainer.notes.has_failed else ()
        for name, change in changed.items():
            yield (
                name,
                f"leaves a context open after an exception in {place}: the {name} is not what it was ({change}); "
                "enter and leave in one generator (with super().forward_context(), mine(): yield)",
            )
        if watch.hooks_of(trainer.unwrap(), [trainer.optimizer]) != hooks:
            yield "hooks", f"leaves hooks behind after an exception in {place}; remove them in teardown()"
        if _threads_left(threads):
            yield "thread", f"leaves a thread running after an exception in {place}; end it in teardown()"


def _error_faults(place: str, error: type[BaseException], raised: BaseException | None) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of a fault where a run does not raise what was raised in it."""
    if raised is None:
        name = "a KeyboardInterrupt" if error is Stopped else "an exception"
        yield (
            f"swallows {name}",
            f"swallows {name} of {place}, so the user never learns of it; let it pass, or raise it "
            "again at the end of the except block",
        )
    elif not isinstance(raised, error):
        yield (
            f"replaces in {place}",
            f"replaces an exception of {place} with {type(raised).__name__} ({raised}); let the first one pass, and "
            "set in __init__ what teardown(), which is called all the same, and the end of a context use",
        )


def _threads_left(before: set[threading.Thread]) -> bool:
    """Return whether threads are left after up to a second."""
    deadline = time.monotonic() + 1
    while (running := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return bool(running)


# ------------------------------------------------------------------------------------------------------ in a state


def check_state(kit: Kit) -> Iterator[str]:
    """Find a state that no checkpoint can contain, and one that is changed by loading it."""
    # Of AddOnBase.generator, and of what training changes in attributes that no class declares.
    names = {*(c.__name__ for c in kit.own_classes), "generators", "user_state"}
    state = kit.standard.notes.states[0]
    entries = {key: value for key, value in state.items() if key not in kit.bare.notes.states[0]}
    faults = []
    for key, value in entries.items():
        if key not in names:
            faults.append(
                f"saves its state under {key!r}, where another add-on may save its own; write "
                f"{{**super().state_dict(), {kit.name!r}: ...}}"
            )
        try:
            as_saved(value)
        except CheckpointError as error:
            faults.append(
                f"has a state that no checkpoint can contain: {error}; return numbers, text, tensors and containers"
            )
    yield from faults or _changes_of_given(kit, state, entries)


def _changes_of_given(kit: Kit, state: dict[str, Any], entries: dict[str, Any]) -> Iterator[str]:
    """Find what loading a state, and training afterwards, change in it."""
    state_given = {**copy.deepcopy(state), **{key: as_saved(value) for key, value in entries.items()}}
    before = copy.deepcopy(state_given)
    with in_new_folder():
        kit.resume(state_given)
    for key in entries:
        path = watch.difference(before[key], state_given.get(key), f"state[{key!r}]")
        if path is not None:
            yield (
                f"changes the state that it was loaded from: {path} is not what it was when the resumed run ends; "
                f"write own, rest = self.take(state, {kit.name!r}, strict), and copy what load_state_dict takes: "
                "tensor.clone(), list(...)"
            )


def check_resume(kit: Kit) -> Iterator[str]:
    """Find a resumed run that ends differently from an uninterrupted one."""
    # The states of generators, which are made when they are asked for, have an entry of their own.
    known = vars(kit.bare).keys() | {"_add_on_generators"} | set(kit.transient)
    for state in kit.standard.notes.states:
        with in_new_folder():
            resumed = kit.resume(copy.deepcopy(state))
        faults = list(_compare(kit, state["progress"]["step"], resumed, known))
        yield from faults
        if faults:
            return


def _compare(kit: Kit, step: int, resumed: Any, known: Collection[str]) -> Iterator[str]:
    """Find attributes and results that differ between a whole run and a resumed one."""
    standard = kit.standard
    lost = [name for name in _differing(standard, resumed) if name not in known]
    if lost:  # A clock differs between any two runs.
        with in_new_folder():
            clocks = set(_differing(standard, kit.run(kit.make())))
        lost = [name for name in lost if name not in clocks]
    for name in lost:
        a = vars(standard)[name]
        b = vars(resumed).get(name)
        yield (
            f"keeps undeclared state: self.{name} is {a!r:.60} after a whole run, and {b!r:.60} after one resumed at "
            f"step {step}; declare state_attributes = ({name!r},), or add it to state_dict() and load_state_dict() "
            f"under the key {kit.name!r}, or name it in transient= when no resume needs it"
        )
    for part, path in list(watch.differing_parts(standard, resumed))[: not lost]:
        yield f"does not resume: saved at step {step}, the {part} ends as another ({path}); save what it needs"


def _differing(a: Any, b: Any) -> list[str]:
    """Name the attributes that differ between two trainers."""
    return [name for name, value in vars(a).items() if watch.difference(value, vars(b).get(name)) is not None]


# ------------------------------------------------------------------------------------------------ several ranks


def check_ranks(kit: Kit) -> Iterator[str]:
    """Find files that every rank writes, and collectives that only some ranks call.

    The add-on trains as rank 0 of 2 and then as rank 1, each with its own values for those of the other.
    """
    if is_engine_slot(kit.add_on.slot):
        return
    task = kit.derive(_with_two_ranks(kit.probe))
    calls: list[list[str]] = []
    for rank in (0, 1):
        with in_new_folder() as folder:
            trainer = kit.run(kit.make(task, kit_rank=rank))
            written = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
        calls.append(trainer.engine.collectives)
        if rank and written:
            yield f"writes on every rank: on rank 1 it writes {written[0]!r}; ask self.is_main first"
    if calls[0] != calls[1]:
        pairs = zip([*calls[0], None], [*calls[1], None])
        first, second = next((a, b) for a, b in pairs if a != b)
        yield (
            f"calls a collective on some ranks only: rank 0 calls {first or 'nothing more'}, rank 1 calls "
            f"{second or 'nothing more'}, and one of them would wait forever; call reduce, gather and barrier on "
            "every rank, outside of `if self.is_main`"
        )


class _OneOfTwo(SingleProcess):
    """The engine of one of two ranks; the other is taken to have the same values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = 2
        self.collectives: list[str] = []

    def reduce(self, value: Tensor) -> Tensor:
        self.collectives.append("reduce or barrier")
        return super().reduce(value) * 2

    def gather(self, value: Any, *, in_background: bool = False) -> list[Any]:
        self.collectives.append("gather")
        return [value, value]


def _with_two_ranks(probe: Any) -> Any:
    """Derive a task that is one of two ranks."""

    class Ranked(probe):
        def __init__(self, *args: Any, kit_rank: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.engine = _OneOfTwo(kit_rank)

    return Ranked


ALL = {name.removeprefix("check_"): function for name, function in list(vars().items()) if name.startswith("check_")}
"""Every check, by the name that ``allow`` takes, in the order in which they run."""
