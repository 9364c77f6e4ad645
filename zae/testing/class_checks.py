"""Checks of the class of an add-on, of its constructor, and of what trainers share."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Iterator
from typing import Any

from zae.composition.introspect import is_marked
from zae.testing import watch
from zae.testing.kit import Kit, build_optimizer, build_scheduler, in_new_folder
from zae.testing.settings import Settings
from zae.trainer import Trainer

__all__ = [
    "check_class",
    "check_factory",
    "check_init",
    "check_pickle",
    "check_settings",
    "check_shared",
    "check_super",
]

FIXED = ("run", "run_epoch", "run_batch", "evaluate", "inference", "predict", "_run")


def check_class(kit: Kit) -> Iterator[str]:
    """Find an override of the loop, options that no signature shows, and a missing docstring."""
    cls = kit.task.add_on(kit.add_on, *kit.beside)
    for name in FIXED:
        if getattr(cls, name) is not getattr(kit.task, name):
            yield f"replaces {name}, which is the loop itself; override a hook inside it instead (see zae.AddOnBase)"
    if not (kit.add_on.__doc__ or "").strip():
        yield "has no docstring; write what it does in one line: explain() and help() show it"


def check_init(kit: Kit) -> Iterator[str]:
    """Find a constructor that does more than store options."""
    bare = kit.make(without_it=True)
    random, weights = watch.streams(), watch.snapshot(bare.unwrap())
    settings, hooks = Settings(), watch.hooks_of(bare.unwrap(), [bare.optimizer])
    groups, threads = watch.groups_of(bare.optimizer), threading.active_count()
    with watch.effects() as effects, watch.output() as text:
        trainer = kit.make()
        changed = {k: v for k, v in settings.changes().items() if k not in ("sys.stdout", "sys.stderr")}
    settings.restore()
    done = list(dict.fromkeys(effects))
    if text.getvalue():
        done.append(f"prints {text.getvalue()[:60]!r}")
    done += [f"draws from the random stream {n!r}, or seeds it" for n, s in watch.streams().items() if s != random[n]]
    done += [f"changes the {name} ({how})" for name, how in changed.items()]
    kit.reported.update(changed)
    if watch.difference(weights, watch.snapshot(trainer.unwrap())) is not None:
        done.append("changes the weights")
    if watch.difference(groups, watch.groups_of(trainer.optimizer)) is not None:
        done.append("changes the optimizer")
    if watch.hooks_of(trainer.unwrap(), [trainer.optimizer]) != hooks:
        done.append("registers hooks")
    if threading.active_count() > threads:
        done.append("starts a thread")
    for each in done:
        yield f"acts in __init__: it {each}; store the options there, and act in setup() or on_run_begin()"
    yield from _stored_objects(kit, trainer, vars(bare).keys())


def _stored_objects(kit: Kit, trainer: Any, known: Any) -> Iterator[str]:
    """Find objects that the constructor stores and ``setup`` may replace."""
    optimizer, scheduler, model = trainer.optimizer, trainer.scheduler, trainer.unwrap()
    wanted = {id(optimizer): "the optimizer", id(scheduler): "the scheduler", id(model): "the model"}
    wanted |= {id(optimizer.state): "the state of the optimizer", id(optimizer.param_groups): "its parameter groups"}
    wanted |= {id(group): "a parameter group of the optimizer" for group in optimizer.param_groups}
    wanted |= {id(p): f"the parameter {name!r}" for name, p in model.named_parameters()}
    wanted |= {id(m): f"the module {name!r}" for name, m in model.named_modules() if name}
    for name, value in vars(trainer).items():
        where = None if name in known else watch.held_in(value, wanted, f"self.{name}")
        if where is not None:
            kit.reported.add("held")
            yield (
                f"holds in __init__ what setup() may replace or wrap: {where}, which was given to the trainer and may "
                "be a factory; read self.optimizer, self.model and self.parameters in setup(), after super().setup(), "
                "or where they are used"
            )


def check_settings(kit: Kit) -> Iterator[str]:
    """Find settings of the process that a run does not restore."""
    assert kit.standard  # In a first run, libraries are imported, which may change something once.
    with in_new_folder():
        kit.run(kit.make())
    for name, how in kit.changes.items():
        if name not in kit.reported:
            kit.reported.add(name)
            yield (
                f"changes a setting of the process and does not restore it: the {name} ({how}); restore it in "
                "teardown(), or use a context manager in one of the context hooks"
            )


def check_pickle(kit: Kit) -> Iterator[str]:
    """Find what cannot be pickled, before a trainer is set up and after a run."""
    for moment in ("before a run", "after a run"):
        with in_new_folder():
            trainer = kit.make(kit.task)
            if moment == "after a run":
                kit.run(trainer, 1)
            try:
                other = pickle.loads(pickle.dumps(trainer))
            except Exception as error:
                yield (
                    f"cannot be pickled {moment} ({type(error).__name__}: {error}), so no process can be started "
                    "with it; keep no lambda, open file, lock or class of a function in an attribute beyond "
                    "teardown(), or name it in process_attributes"
                )
                return
            if type(other) is not type(trainer):
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
            kit.run(kit.make())
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
    mine, reached = calls.count[name] / max(1, len(overrides)), calls.count[f"{name} of Trainer"]
    if reached < mine - broken:  # A call that raised has not reached it either.
        return (
            f"forgets super().{name}(): of {mine:g} calls of {name}, {reached} reached what is inside; call it on "
            "every path, or mark the method with @zae.replaces"
        )
    if reached > mine and not any(is_marked(owner.__dict__[name], "__repeats__") for owner in owners):
        return (
            f"calls super().{name}() more than once: {reached} times in {mine:g} calls; call it once, or mark the "
            "method with @zae.repeats"
        )
    return None


def _code(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else value
    return getattr(value, "__wrapped__", value).__code__


def check_factory(kit: Kit) -> Iterator[str]:
    """Find add-ons that read the optimizer before it is built: a user may give a function that makes it."""
    if "held" in kit.reported:
        return
    try:
        trainer = kit.make(optimizer=build_optimizer, scheduler=build_scheduler)
        kit.run(trainer)
    except Exception as error:
        yield (
            f"fails where optimizer= and scheduler= are functions that make them ({type(error).__name__}: {error}); "
            "read self.optimizer in setup(), after super().setup(), not before"
        )


def check_shared(kit: Kit) -> Iterator[str]:
    """Find state on the class, which all trainers share, and changes of the options that the caller gave."""
    assert kit.standard  # A run has been made, in which they may change.
    for name, value in watch.class_values(kit.own_classes).items():
        if name not in kit.shared or watch.difference(kit.shared[name], value) is not None:
            attribute = name.partition(".")[2]
            yield (
                f"keeps state on the class: {name} changes in a run, and all trainers share it; set "
                f"self.{attribute} in __init__ instead"
            )
    for name, value in kit.given.items():
        if watch.difference(value, kit.options[name]) is not None:
            yield (
                f"changes the option {name!r} that the caller gave; copy it in __init__: self.{name} = list({name}) "
                f"or dict({name})"
            )
