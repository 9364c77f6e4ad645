"""The checks of `zae.testing.check_addon`, each a function that yields the faults it finds, with their cures."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zae import testing_watch as watch
from zae.seams import is_marked
from zae.testing import Interruption, Kit, in_new_folder
from zae.trainer import Trainer

__all__ = ["CHECKS"]

FIXED = ("run", "run_epoch", "run_batch", "evaluate", "inference", "_run", "_set_up")
Check = Callable[[Kit], Iterator[str]]


def check_class(kit: Kit) -> Iterator[str]:
    """It overrides seams, not the loop."""
    cls = kit.task.add_on(kit.add_on, *kit.beside)
    for name in FIXED:
        if getattr(cls, name) is not getattr(kit.task, name):
            yield f"replaces {name}, which is the loop itself; override a seam inside it instead (see zae.AddOnBase)"
    if not (kit.add_on.__doc__ or "").strip():
        yield "has no docstring; write what it does in one line: explain() and help() show it"


def check_init(kit: Kit) -> Iterator[str]:
    """``__init__`` only stores options."""
    bare = kit.make(without_it=True)
    random, weights = watch.streams(), {k: v.clone() for k, v in bare.unwrap().state_dict().items()}
    settings, hooks = watch.global_settings(), watch.hooks_of(bare.unwrap(), [bare.optimizer])
    threads = threading.active_count()
    with watch.effects() as effects, watch.output() as text:
        trainer = kit.make()
    done = list(dict.fromkeys(effects))
    if text.getvalue():
        done.append(f"prints {text.getvalue()[:60]!r}")
    done += [f"draws from the random stream {n!r}" for n, s in watch.streams().items() if s != random[n]]
    done += [f"changes the {name}" for name, value in watch.global_settings().items() if value != settings[name]]
    if watch.difference(weights, dict(trainer.unwrap().state_dict())) is not None:
        done.append("changes the weights")
    if watch.hooks_of(trainer.unwrap(), [trainer.optimizer]) != hooks:
        done.append("registers hooks")
    if threading.active_count() > threads:
        done.append("starts a thread")
    for each in done:
        yield f"acts in __init__: it {each}; store the options there, and act in setup() or on_run_begin()"


def check_pickle(kit: Kit) -> Iterator[str]:
    """A trainer travels to another process, before it is set up and after a run."""
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
                    "with it; keep no lambda, open file, lock or class of a function in an attribute beyond teardown()"
                )
                return
            if type(other) is not type(trainer):
                yield "becomes another class when it is pickled; define the add-on at the top of a module"


def check_super(kit: Kit) -> Iterator[str]:
    """Every override of a seam calls ``super()``, once."""
    outer = kit.own_seams()
    names = set(outer.values())
    inner = {f"{name} of Trainer": getattr(Trainer, name) for name in names}
    codes = {_code(value): name for name, value in inner.items()}
    broken: Exception | None = None
    with _kept_busy(kit.add_on), watch.Calls({**outer, **codes}) as calls:
        try:
            kit.run(kit.make())
        except Exception as error:  # Often because what is inside was not reached: told below, or raised again.
            broken = error
    faults = [fault for name in sorted(names) if (fault := _uncalled(kit, name, outer, calls, broken is not None))]
    if broken is not None and not faults:
        raise broken
    yield from faults


def _uncalled(kit: Kit, name: str, outer: dict[Any, str], calls: watch.Calls, broken: bool) -> str | None:
    """Compare how often an override was called with how often it reached what is inside of it."""
    owners = [c for c in kit.add_on.__mro__ if name in c.__dict__]
    if any(is_marked(owner.__dict__[name], "__replaces__") for owner in owners):
        return None
    overrides = [code for code, known in outer.items() if known == name]
    mine, reached = calls.count[name] / max(1, len(overrides)), calls.count[f"{name} of Trainer"]
    if reached < mine - broken:  # The call that broke off has not reached it either.
        return (
            f"forgets super().{name}(): of {mine:g} calls of {name}, {reached} reached what is inside; call it on "
            "every path, or mark the method with @zae.replaces"
        )
    if reached > mine:
        return (
            f"calls super().{name}() more than once: {reached} times in {mine:g} calls; call it once, or mark the "
            "method with @zae.replaces"
        )
    return None


def _code(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else value
    return getattr(value, "__wrapped__", value).__code__


def check_clip(kit: Kit) -> Iterator[str]:
    """With ``gradient_clip``, no larger gradient reaches the optimizer."""
    limit = 0.01
    trainer = kit.run(kit.make(gradient_clip=limit))
    largest = max((norm for norm in trainer.notes.norms if norm == norm and norm != float("inf")), default=0.0)
    if largest > limit * 1.001:
        yield (
            f"drops clipping: with gradient_clip={limit}, a gradient of norm {largest:.3g} reached the optimizer; call "
            "super().clip(), and change gradients before it (in clip or unscale), not after"
        )


def check_scheduler(kit: Kit) -> Iterator[str]:
    """A scheduler is stepped once for each optimizer step, or each epoch."""
    for on_batch in (True, False):
        with in_new_folder():
            trainer = kit.run(kit.make(scheduler_step_on_batch=on_batch))
            progress = trainer.progress_checker
            due = progress.step - progress.skipped_steps if on_batch else progress.epoch
            taken = trainer._schedulers["0"].last_epoch
            if taken != due:
                unit = "optimizer steps" if on_batch else "epochs"
                yield (
                    f"steps the scheduler {taken} times in {due} {unit}; leave it to scheduler_step, and call "
                    "super().scheduler_step(when) once"
                )
                return


def check_batch(kit: Kit) -> Iterator[str]:
    """The user's batches are as they were."""
    data, before = kit.data(), kit.data()
    kit.run(kit.make(), data=data)
    found = watch.difference(before, data, "batches")
    if found is not None:
        yield f"mutates the batch: {found} is not what the loader gave; change a copy, in to_device"


def check_mode(kit: Kit) -> Iterator[str]:
    """Steps run in the mode that is theirs."""
    trainer = kit.run(kit.make())
    for step, training in dict.fromkeys(trainer.notes.modes):
        if training != (step == "train_step"):
            yield (
                f"changes model.training: it is {training} inside {step}; put it back where you change it (in a "
                "context: try, yield, finally)"
            )
    if not trainer.unwrap().training:
        yield "changes model.training: it is False after a run in mode 'train'; put it back where you change it"


def check_graph(kit: Kit) -> Iterator[str]:
    """No tensor that is kept holds a step's graph alive."""
    trainer = kit.run(kit.make())
    bare = kit.make(without_it=True).__dict__.keys()
    for name, value in trainer.__dict__.items():
        where = None if name in bare - {"log_history"} else watch.graph_in(value, f"self.{name}")
        if where is not None:
            yield f"keeps a tensor with its graph: {where}, so no step's memory is freed; keep tensor.detach()"


def check_random(kit: Kit) -> Iterator[str]:
    """Training's random streams are left alone."""
    trainer, drawn = kit.make(), list[str]()
    before: dict[str, Any] = {}

    def look(name: str) -> None:
        now = watch.streams()
        drawn.extend(f"{name} draws from the global random stream {k!r}" for k in now if before[k] != now[k])
        before.update(now)

    torch.manual_seed(7)
    before.update(watch.streams())
    seams = {code: name for code, name in kit.own_seams().items() if name not in ("launch", "gradients")}
    with watch.Calls(seams, look):
        trainer.run(2, kit.data(), kit.data()[:2], valid_every=2)
    with in_new_folder():
        kit.run(kit.make(without_it=True))
    if watch.streams() != before and not drawn:
        drawn = [f"a run ends with another state of the stream {k!r}" for k, s in watch.streams().items()
                 if s != before[k]]  # fmt: skip
    for each in drawn[:1]:
        yield f"{each}, and so changes training; draw from a torch.Generator of your own, or inside zae.rng.isolated()"


def check_transfer(kit: Kit) -> Iterator[str]:
    """Nothing waits for the device at every step."""
    trainer = kit.make()
    with watch.Transfers(set(kit.own_codes())) as transfers:
        kit.run(trainer, valid=False)
    steps = trainer.progress_checker.step
    if len(transfers.found) >= steps:
        places = ", ".join(dict.fromkeys(transfers.found))
        yield (
            f"synchronises at each step: it reads a tensor's value {len(transfers.found)} times in {steps} steps "
            f"({places}); keep tensors on their device, detached, and read them in log() or at the end of an epoch"
        )


def check_exception(kit: Kit) -> Iterator[str]:
    """After an exception, everything is as it was before the run."""
    for place in ("train_step", "test_step"):
        with in_new_folder():
            settings, threads, files = watch.global_settings(), threading.active_count(), _open_files()
            trainer = kit.make()
            hooks = watch.hooks_of(trainer.unwrap(), [trainer.optimizer])
            trainer.notes.fail_in = place
            try:
                kit.run(trainer)
                yield f"swallows an exception of {place}; let it pass"
            except Interruption:
                left = [n for n, value in watch.global_settings().items() if value != settings[n]]
                for name in left:
                    yield (
                        f"leaves a context open after an exception in {place}: the {name} is not what it was; enter "
                        "and leave in one generator (with super().forward_context(), mine(): yield)"
                    )
                if watch.hooks_of(trainer.unwrap(), [trainer.optimizer]) != hooks:
                    yield f"leaves hooks behind after an exception in {place}; remove them in teardown()"
                yield from _left_behind(threads, files, place)
            finally:
                torch.set_grad_enabled(True)


def _left_behind(threads: int, files: int, place: str) -> Iterator[str]:
    deadline = time.monotonic() + 2
    while (threading.active_count() > threads or _open_files() > files) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    if threading.active_count() > threads:
        yield f"leaves a thread running after an exception in {place}; end it in teardown()"
    if _open_files() > files:
        yield f"leaves a file open after an exception in {place}; close it in teardown()"


def _open_files() -> int:
    """File descriptors of this process; 0 where the system does not tell."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def check_state(kit: Kit) -> Iterator[str]:
    """A run that was saved and loaded ends like one that was not."""
    whole = kit.make()
    whole.notes.fail_in = "after two steps"
    kit.run(whole)
    bare = kit.run(kit.make(without_it=True))
    known = bare.__dict__.keys() | set(kit.transient)
    for state in whole.notes.states:
        at = state["progress"]["step"]
        with in_new_folder():
            resumed = kit.make()
            resumed.load_state_dict(state)
            resumed._calls = 0  # The interrupted call of run is gone on with.
            kit.run(resumed)
        values = [(name, value, resumed.__dict__.get(name)) for name, value in whole.__dict__.items()]
        lost = [(n, a, b) for n, a, b in values if n not in known and watch.difference(a, b) is not None]
        for name, a, b in lost:
            yield (
                f"keeps undeclared state: self.{name} is {a!r:.60} after a whole run, and {b!r:.60} after one resumed "
                f"at step {at}; add it to state_dict() and load_state_dict() under the key {kit.name!r}, or name it in "
                "transient= when no resume needs it"
            )
        parted = list(_parted(whole, resumed))
        if parted and not lost:
            yield (
                f"does not resume: saved at step {at}, the {parted[0][0]} ends as another ({parted[0][1]}); save what "
                "it needs"
            )
        if parted or lost:
            return


def _parted(a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """What two trainers differ in at the end."""
    rows: dict[str, Callable[[Any], Any]] = {
        "model": lambda t: dict(t.unwrap().state_dict()),
        "optimizer": lambda t: t.optimizer.state_dict(),
        "scheduler": lambda t: {k: v for k, v in t.scheduler.state_dict().items() if k[0] != "_"},
        "history": lambda t: [dict(row) for row in t.train_history + t.valid_history],
        "progress": lambda t: [t.progress_checker.step, t.progress_checker.epoch, t.progress_checker.skipped_steps],
    }
    for part, read in rows.items():
        found = watch.difference(read(a), read(b), part)
        if found is not None:
            yield part, found


def check_ranks(kit: Kit) -> Iterator[str]:
    """Only the main rank writes."""
    if kit.add_on.slot == "parallel":
        return
    task: Any = None
    members = {
        "rank": property(lambda self: 1),
        "world_size": property(lambda self: 2),
        "reduce": lambda self, value: super(task, self).reduce(value) * 2,
        "gather": lambda self, value: [value, *super(task, self).gather(value)],
    }
    task = kit.probe(**members)
    trainer = kit.make(task)
    with watch.effects() as effects, watch.output() as text:
        kit.run(trainer)
    for each in list(dict.fromkeys(effects))[:1]:
        yield f"logs on every rank: on rank 1 it {each}; ask self.is_main first"
    if text.getvalue():
        yield f"logs on every rank: on rank 1 it prints {text.getvalue()[:60]!r}; ask self.is_main first"


def check_neutral(kit: Kit) -> Iterator[str]:
    """An observer, and what keeps state, changes nothing at all."""
    if kit.add_on.layer not in ("observe", "state"):
        return
    watched = kit.run(kit.make())
    with in_new_folder():
        alone = kit.run(kit.make(without_it=True))
    for part, found in list(_parted(alone, watched))[:1]:
        yield (
            f"is in layer {kit.add_on.layer!r} and changes training: the {part} ends as another than without it "
            f"({found}); only look at what there is, or move to the layer 'loop'"
        )


def check_idle(kit: Kit) -> Iterator[str]:
    """Steps that leave it out are those that it has no hand in."""
    passed_by = kit.run(kit.make())
    with in_new_folder(), _kept_busy(kit.add_on) as says:
        busy = kit.run(kit.make()) if says else passed_by
    for part, found in list(_parted(busy, passed_by))[:1]:
        yield (
            f"says that it is idle and is not: passed by in the steps, the {part} ends as another ({found}); let "
            "is_idle() return False wherever a seam of the step does something"
        )


@contextlib.contextmanager
def _kept_busy(add_on: Any) -> Iterator[bool]:
    """Have the seams of an add-on called, whatever it says; gives whether it says anything."""
    owner = next(c for c in add_on.__mro__ if "is_idle" in c.__dict__)
    says = not owner.__dict__.get("_is_base")
    before = owner.is_idle
    if says:
        owner.is_idle = lambda self: False
    try:
        yield says
    finally:
        if says:
            owner.is_idle = before


CHECKS: dict[str, Check] = {
    "class": check_class,
    "init": check_init,
    "pickle": check_pickle,
    "super": check_super,
    "clip": check_clip,
    "scheduler": check_scheduler,
    "batch": check_batch,
    "mode": check_mode,
    "graph": check_graph,
    "random": check_random,
    "transfer": check_transfer,
    "exception": check_exception,
    "state": check_state,
    "ranks": check_ranks,
    "neutral": check_neutral,
    "idle": check_idle,
}
"""Every check, by the name that ``allow`` takes."""
