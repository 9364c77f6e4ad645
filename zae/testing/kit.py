"""Shared by the checks of an add-on: a small task, trainers with and without the add-on, and standard runs."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zae.addon import AddOnBase
from zae.compose.introspect import function_of, hooks_of, kinds_of
from zae.compose.options import options_of
from zae.errors import ZaeError
from zae.random_state import capture, seed_everything
from zae.testing import watch
from zae.trainer import Trainer

__all__ = ["AddOnFault", "Kit", "Loader", "PlainTask", "in_new_folder"]


class AddOnFault(ZaeError, AssertionError):
    """An add-on has faults; the message names each with its remedy."""


class PlainTask(Trainer):
    """The regression that `check_addon` trains if it is given no ``task``.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import EMAAddon
    >>> from zae.testing import PlainTask
    >>> trainer = PlainTask.add_on(EMAAddon)(torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD)
    >>> trainer.run(1, [(torch.ones(4, 2), torch.ones(4, 1))] * 3)["step"]
    3
    """

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the squared error."""
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    test_step = train_step


@dataclass
class Notes:
    """What is observed in one run."""

    fail_in: str = ""
    error: type[BaseException] = Exception
    has_failed: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    modes: list[tuple[str, bool]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    keeps_states: bool = False
    states: list[dict[str, Any]] = field(default_factory=list)
    streams: dict[str, Any] = field(default_factory=dict)

    def enter(self, step: str, model: nn.Module, at: int = 1) -> None:
        """Note the mode of a step, and raise where ``fail_in`` says so."""
        self.modes.append((step, model.training))
        self.fail(step, at)

    def fail(self, place: str, at: int = 1) -> None:
        """Raise in call number ``at`` of this place, where ``fail_in`` names it."""
        self.calls[place] = self.calls.get(place, 0) + 1
        if self.fail_in == place and self.calls[place] == at:
            self.has_failed = True
            raise self.error("raised on purpose by check_addon")


class Loader:
    """Batches, one of which may fail to come."""

    def __init__(self, batches: list[Any], notes: Notes | None = None) -> None:
        self.batches, self.notes = batches, notes or Notes()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.notes.fail("loader", at=3)
            yield batch


class KitResumeAddon(AddOnBase):
    """Load a state where a resume does, at the end of setup."""

    layer = "state"

    def __init__(self, *args: Any, kit_state: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kit_state = kit_state

    def setup(self) -> None:
        super().setup()
        if self.kit_state is not None:
            state = self.kit_state
            self.kit_state = None
            self.load_state_dict(state)
            self.progress_checker.run_calls.index = 0  # The interrupted call of run continues.


@dataclass
class Kit:
    """Make and run trainers with the add-on; its attributes are the arguments of `check_addon`."""

    add_on: Any
    options: Mapping[str, Any]
    task: type[Trainer] = PlainTask
    model: Callable[[], nn.Module] | None = None
    batches: Callable[[], Any] | None = None
    beside: Sequence[Any] = ()
    transient: Collection[str] = ()
    changes: dict[str, str] = field(default_factory=dict)
    """The settings of the process that the last run has changed."""

    @property
    def name(self) -> str:
        return str(self.add_on.__name__)

    @property
    def own_classes(self) -> list[Any]:
        """The add-on and those of its bases that are add-ons, without AddOnBase."""
        return kinds_of(self.add_on)

    @cached_property
    def probe(self) -> Any:
        """A class derived from the task that notes what happens in each step, inside of the add-ons."""
        return self.derive(_probing(self.task))

    @cached_property
    def _bare_keys(self) -> set[str]:
        return set(options_of(self.probe.add_on(*self.beside)))

    def derive(self, base: Any) -> Any:
        """Derive a class with the name of the task."""
        return type(self.task.__name__, (base,), {"__module__": __name__})

    def build_model(self) -> nn.Module:
        """Make the model, the same each time."""
        seed_everything(0)
        return self.model() if self.model else nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def make(self, task: Any = None, without_it: bool = False, add: Sequence[Any] = (), **keywords: Any) -> Any:
        """Make a trainer from a seed, with the add-on or without it."""
        model = self.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        task = self.probe if task is None else task
        cls = task.add_on(*self.beside, *add) if without_it else task.add_on(self.add_on, *self.beside, *add)
        options = {k: v for k, v in self.options.items() if not without_it or k in self._bare_keys}
        keywords = {
            "gradient_clip": 0.1,
            "scheduler_step_on_batch": True,
            "log_bar": False,
            **keywords,
            **options,
        }
        trainer = cls(model, "cpu", optimizer=optimizer, scheduler=scheduler, **keywords)
        trainer.notes = Notes()
        return trainer

    def data(self) -> list[Any]:
        """Return six batches, the same each time."""
        if self.batches is not None:
            return list(self.batches())
        return _draw(1, (4, 4, 4, 4, 4, 3))

    def valid_data(self) -> list[Any]:
        """Return two batches on which the loss falls and then rises, so that the best epoch is not the last."""
        return self.data()[:2] if self.batches is not None else _draw(4, (4, 4))

    def run(self, trainer: Any, n_epoch: int = 2, data: Any = None, valid: Any = True) -> Any:
        """Train, with a validation every second step; restore the settings of the process, and return the trainer."""
        data = data if isinstance(data, Loader) else Loader(self.data() if data is None else data)
        valid = self.valid_data() if valid is True else valid or None
        torch.manual_seed(7)
        with warnings.catch_warnings():  # Restores the filters.
            settings = watch.Settings()
            try:
                trainer.run(n_epoch, data, valid, valid_every=2 if valid else None)
            finally:
                trainer.notes.streams = capture()
                self.changes = settings.restore()
        return trainer

    @cached_property
    def standard(self) -> Any:
        """A trainer with the add-on after a run, which several checks look at."""
        return self._observe(self.make())

    @cached_property
    def bare(self) -> Any:
        """A trainer without the add-on after the same run."""
        return self._observe(self.make(without_it=True))

    def resume(self, state: Mapping[str, Any]) -> Any:
        """Return a trainer that has continued from a state to the end of the run."""
        return self.run(self.make(add=[KitResumeAddon], kit_state=state))

    def _observe(self, trainer: Any) -> Any:
        trainer.notes.keeps_states = True
        with in_new_folder():
            return self.run(trainer)

    @property
    def own_hooks(self) -> dict[Any, str]:
        """The names of the hooks that the add-on overrides, by their code."""
        hooks = hooks_of(Trainer)
        methods = [item for klass in self.own_classes for item in vars(klass).items() if item[0] in hooks]
        codes = [(getattr(function_of(value), "__code__", None), name) for name, value in methods]
        return {code: name for code, name in codes if code is not None}


def _draw(seed: int, sizes: Sequence[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, width, generator=generator) for width in (3, 2)] for size in sizes]


def _probing(task: Any) -> Any:
    """Derive a class from a task that notes what happens in each step."""

    class Probe(task):
        notes: Notes

        def setup(self) -> None:
            super().setup()
            self.notes.fail("setup")

        def train_step(self, batch: Any) -> Any:
            if self.mode == "test":  # A test_step that calls it.
                return super().train_step(batch)
            self.notes.enter("train_step", self.unwrap(), at=3)
            return super().train_step(batch)

        def test_step(self, batch: Any) -> Any:
            self.notes.enter("test_step", self.unwrap())
            return super().test_step(batch)

        def metric_on_epoch_end(self) -> Any:
            self.notes.fail("metric_on_epoch_end")
            return super().metric_on_epoch_end()

        def step_one(self, optimizer: Any) -> bool:
            self.notes.norms.append(_gradient_norm(optimizer))
            self.notes.fail("step_one", at=3)
            return bool(super().step_one(optimizer))

        def checkpoint(self) -> None:
            super().checkpoint()
            if self.notes.keeps_states and self.progress_checker.step in (2, 6):
                self.notes.states.append(copy.deepcopy(self.state_dict()))

    return Probe


def _gradient_norm(optimizer: Any) -> float:
    gradients = [p.grad.double() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norms = [(gradient.to_dense() if gradient.is_sparse else gradient).norm() for gradient in gradients]
    return float(torch.stack(norms).norm()) if norms else 0.0


@contextlib.contextmanager
def in_new_folder() -> Iterator[str]:
    """Work in a new folder, so that relative paths among the options are new in every run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield folder
