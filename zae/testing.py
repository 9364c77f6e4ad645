"""The kit that proves an add-on: `check_addon` holds it to the contract that the add-ons of zae keep.

Each check trains a small model for a few steps on the CPU, in a new folder. What it needs to know of an add-on are the
options that it takes; the rest is read off the class.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zae.addon import AddOnBase
from zae.errors import AddOnError, ZaeError
from zae.options import options_of
from zae.rng import seed_everything
from zae.seams import function_of, is_add_on, seams_of
from zae.trainer import Trainer

__all__ = ["AddOnFault", "Kit", "check_addon"]


class AddOnFault(ZaeError, AssertionError):
    """An add-on does not keep the contract; the message names each fault and its cure."""


class PlainTask(Trainer):
    """The least that can be trained."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the squared error."""
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the squared error."""
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}


class Interruption(Exception):
    """What a step raises where a check wants it to."""


@dataclass
class Notes:
    """What is seen in one run, and where its steps are to fail."""

    fail_in: str = ""
    calls: int = 0
    modes: list[tuple[str, bool]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Kit:
    """What the checks share: how a trainer with the add-on is made and run."""

    add_on: Any
    options: Mapping[str, Any]
    task: type[Trainer] = PlainTask
    model: Callable[[], nn.Module] | None = None
    batches: Callable[[], Any] | None = None
    beside: Sequence[Any] = ()
    transient: Collection[str] = ()

    @property
    def name(self) -> str:
        return str(self.add_on.__name__)

    def probe(self, **members: Any) -> Any:
        """The task, with somebody who looks at every step; the add-ons come outside of it."""
        made: Any = type(self.task.__name__, (_probing(self.task),), {"__module__": __name__, **members})
        return made

    def make(self, task: Any = None, without_it: bool = False, **more: Any) -> Any:
        """Make a trainer from a seed, with the add-on or without it."""
        seed_everything(0)
        model = self.model() if self.model else nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        task = task or self.probe()
        cls = task.add_on(*self.beside) if without_it else task.add_on(self.add_on, *self.beside)
        known = options_of(cls)
        options = {name: value for name, value in self.options.items() if name in known or not without_it}
        more = {"gradient_clip": 0.1, "scheduler_step_on_batch": True, "log_bar": False, **more, **options}
        trainer = cls(model, "cpu", optimizer=optimizer, scheduler=scheduler, **more)
        trainer.notes = Notes()
        return trainer

    def data(self) -> list[Any]:
        """Six batches, the same each time."""
        if self.batches is not None:
            return list(self.batches())
        generator = torch.Generator().manual_seed(1)
        return [[torch.randn(n, k, generator=generator) for k in (3, 2)] for n in (4, 4, 4, 4, 4, 3)]

    def run(self, trainer: Any, n_epoch: int = 2, data: Any = None, valid: bool = True) -> Any:
        """Train, validating every second step; return the trainer."""
        data = self.data() if data is None else data
        torch.manual_seed(7)
        trainer.run(n_epoch, data, self.data()[:2] if valid else None, valid_every=2 if valid else None)
        return trainer

    def own_codes(self) -> dict[Any, str]:
        """The code of every method that the add-on has, by name."""
        classes = [c for c in self.add_on.__mro__ if is_add_on(c) and not c.__dict__.get("_is_base")]
        found = {}
        for klass in classes:
            for name, value in klass.__dict__.items():
                code = getattr(function_of(value), "__code__", None)
                if code is not None:
                    found[code] = name
        return found

    def own_seams(self) -> dict[Any, str]:
        """The code of every seam that the add-on overrides."""
        seams = seams_of(Trainer)
        return {code: name for code, name in self.own_codes().items() if name in seams}


def _probing(task: Any) -> Any:
    """Derive from a task a class that notes what happens in each step."""

    class Probe(task):
        notes: Notes

        def train_step(self, batch: Any) -> Any:
            if self.mode == "test":  # A test_step that calls it.
                return super().train_step(batch)
            self.notes.calls += 1
            self.notes.modes.append(("train_step", bool(self.unwrap().training)))
            if self.notes.fail_in == "train_step" and self.notes.calls == 3:
                raise Interruption("a step fails on purpose")
            return super().train_step(batch)

        def test_step(self, batch: Any) -> Any:
            self.notes.modes.append(("test_step", bool(self.unwrap().training)))
            if self.notes.fail_in == "test_step":
                raise Interruption("a step fails on purpose")
            return super().test_step(batch)

        def step_one(self, optimizer: Any) -> bool:
            gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            if gradients:
                self.notes.norms.append(float(torch.stack([g.double().norm() for g in gradients]).norm()))
            return bool(super().step_one(optimizer))

        def checkpoint(self) -> None:
            super().checkpoint()
            if self.notes.fail_in == "after two steps" and self.progress_checker.step in (2, 6):
                self.notes.states.append(copy.deepcopy(self.state_dict()))

    return Probe


@contextlib.contextmanager
def in_new_folder() -> Iterator[str]:
    """Work in a folder of its own: relative paths among the options begin afresh in every run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield folder


def check_addon(
    add_on: Any,
    *,
    task: type[Trainer] = PlainTask,
    model: Callable[[], nn.Module] | None = None,
    batches: Callable[[], Any] | None = None,
    beside: Sequence[Any] = (),
    allow: Collection[str] = (),
    transient: Collection[str] = (),
    **options: Any,
) -> None:
    """Prove that an add-on keeps the contract, by training with it; one call in your own tests.

    Parameters
    ----------
    add_on : type
        The add-on.
    task : type, optional
        A trainer class to try it with, where the plain one will not do.
    model, batches : callable, optional
        Make the model and a few batches for ``task``.
    beside : sequence of type
        Add-ons that are there too: those that it requires, and others whose company is to be proven.
    allow : collection of str
        Checks to leave out, by the names of `zae.testing_checks.CHECKS`: "class", "init", "pickle", "super", "clip",
        "scheduler", "batch", "mode", "graph", "random", "transfer", "exception", "state", "ranks", "neutral",
        "idle".
    transient : collection of str
        Attributes that change in a run, and that a resumed one does not need.
    **options
        What the add-on takes. Write relative paths: each run has a new working folder.

    Raises
    ------
    AddOnFault
        With every fault that was found, and the cure of each.

    Examples
    --------
    >>> from zae import AddOnBase
    >>> from zae.testing import check_addon
    >>> class HalveAddon(AddOnBase):
    ...     "Halve every gradient."
    ...     layer = "loop"
    ...     def clip(self):
    ...         for parameter in self.parameters:
    ...             parameter.grad.div_(2)
    ...         super().clip()
    >>> check_addon(HalveAddon, allow=["pickle"])  # Made in a doctest, it cannot be found by its name.
    """
    from zae.testing_checks import CHECKS

    unknown = set(allow) - CHECKS.keys()
    if unknown:
        raise AddOnError(f"allow has {sorted(unknown)}; the checks are {', '.join(CHECKS)}")
    if not (is_add_on(add_on) and issubclass(add_on, AddOnBase)):
        raise AddOnFault(f"{add_on!r} is not an add-on; write class MyAddon(AddOnBase)")
    kit = Kit(add_on, options, task, model, batches, beside, transient)
    faults: list[str] = []
    broken: dict[str, list[str]] = {}
    for name, check in CHECKS.items():
        if name in allow:
            continue
        with in_new_folder():
            try:
                faults.extend(f"{told} [{name}]" for told in check(kit))
            except Exception as error:
                broken.setdefault(f"raises {type(error).__name__}: {error}", []).append(name)
    faults += [f"{error} [{', '.join(names)}]" for error, names in broken.items()]
    if faults:
        lines = "".join(f"\n  {index}. {fault}" for index, fault in enumerate(faults, start=1))
        raise AddOnFault(f"{kit.name} has {len(faults)} fault{'s' * (len(faults) > 1)}:{lines}")
