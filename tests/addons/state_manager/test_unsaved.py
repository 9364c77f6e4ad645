"""What a run changes and no checkpoint holds is named where a run continues from one; what is the same is not."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kit.hand import data
from zae import AddOnBase, Trainer
from zae.addons import StateManagerAddon


class Noise(nn.Module):
    """Draws from its own stream, keeps its last value, and counts in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.last, self.rate = torch.Generator().manual_seed(3), torch.zeros(1), 0.2
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("saved", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.saved += 1
        self.last = inputs + 0.1 * torch.rand(inputs.shape, generator=self.stream)
        return self.last


class World:
    """An environment, as a learner by reinforcement has one."""

    def __init__(self) -> None:
        self.random, self.size = np.random.default_rng(1), 4


class Settings(dict):
    """Has an attribute of any name, as those of several libraries do."""

    def __getattr__(self, name: str) -> Any:
        return Settings()


class Keeps(Trainer):
    """Keeps all that a class of a user may keep between two steps, and some that stays as it is."""

    settings = Settings(rate=0.1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream, self.world, self.memory = np.random.default_rng(5), World(), deque(maxlen=100)
        self.average = copy.deepcopy(self.unwrap())
        self.hidden: Any = None
        self.table, self.baseline = np.zeros(1000), 0.0
        self.wide = torch.zeros(1).expand(10**6, 10**6)  # In full more than there is memory for.
        # These do not change.
        self.teacher, self.power, self.names, self.more = nn.Linear(4, 2), 2.0, ["a", "b"], Settings(a=1)
        self.noise, self.levels = np.random.default_rng(6), torch.linspace(0, 1, 500)

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        outputs = self.model(inputs) * float(self.stream.random()) ** self.power
        self.world.random.normal()
        self.wide._base.add_(1)
        self.memory.append((inputs, targets))
        self.hidden = outputs.detach()
        self.table[self.progress_checker.step] = self.baseline = 1.0 + self.baseline
        for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(weight.data, alpha=0.1)  # By .data, which moves no version of the tensor.
        return {"loss": F.cross_entropy(outputs + self.teacher(inputs).detach(), targets)}

    def test_step(self, batch: Any) -> Any:
        return {"loss": F.cross_entropy(self.model(batch[0]), batch[1])}


class Saves(Keeps):
    """The same, with its own state: it is the class decides what is in it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "Saves": {"baseline": self.baseline}}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        rest = dict(state)
        self.baseline = rest.pop("Saves")["baseline"]
        super().load_state_dict(rest, strict)


class Counts(AddOnBase):
    """An add-on that does not save its counter."""

    layer = "loop"

    def zero_grad(self) -> None:
        super().zero_grad()
        self.count = getattr(self, "count", 0) + 1


def trainer(task: Any, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), *([Noise()] if task is Keeps else []))
    optimizer = torch.optim.Adam(model.parameters())
    return task.add_on(StateManagerAddon, Counts)(
        model, "cpu", optimizer=optimizer, save_path=folder / task.__name__, resume="auto", **options
    )


BATCHES = [data(8).tensors, data(8, seed=4).tensors]


def test_a_resume_names_what_a_class_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Exact, or said: a stream, a hidden state, an average that the trainer or a module keeps itself."""
    first = trainer(Keeps, tmp_path)
    first.run(1, BATCHES)
    first.run(1, BATCHES)
    pickle.loads(pickle.dumps(first))
    assert not [r for r in caplog.records if "lacks" in r.message], "in one process nothing is lost"
    again = trainer(Keeps, tmp_path)
    again.run(3, BATCHES)
    (told,) = [r for r in caplog.records if "lacks" in r.message]
    names = ("average", "baseline", "count", "hidden", "memory", "stream", "table", "wide", "world")
    named = [*(f"Keeps.{name}" for name in names), *(f"model.1.{name}" for name in ("calls", "last", "stream"))]
    assert told.levelno == logging.WARNING
    shown = f"{', '.join(map(repr, named[:10]))} and 2 more"
    assert told.message.startswith(f"the state that this run resumes from lacks {shown}, which")
    named.remove("Keeps.count")  # Nothing is trained, so that there is none yet.
    assert again.state_dict()["StateManagerAddon"]["unsaved"] == named


def test_a_resume_names_nothing_that_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class with its own state is believed, and a state without anything to say has no entry for it."""
    trainer(Saves, tmp_path).run(1, BATCHES)
    again = trainer(Saves, tmp_path)
    again.run(2, BATCHES)
    assert (again.progress_checker.step, again.baseline) == (4, 4.0)
    assert "unsaved" not in again.state_dict()["StateManagerAddon"]
    assert not [r for r in caplog.records if "lacks" in r.message]


class Momentum(torch.optim.Optimizer):
    """Keeps all of its state in attributes, which torch does not save."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count, self.means, self.stream = 0, {}, torch.Generator().manual_seed(2)
        self.decay = 0.9  # This does not change.

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            mean = self.means.setdefault(parameter, torch.zeros_like(parameter)).mul_(self.decay).add_(parameter.grad)
            parameter.sub_(mean * torch.rand((), generator=self.stream), alpha=0.1 / self.count)


class SavedMomentum(Momentum):
    """The same, with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        own = {"count": self.count, "means": [*self.means.values()], "stream": self.stream.get_state()}
        return super().state_dict() | own

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        self.means = dict(zip(self.param_groups[0]["params"], state["means"], strict=False))
        self.stream.set_state(state["stream"])
        super().load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})


class Classifies(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": F.cross_entropy(self.model(batch[0]), batch[1])}

    test_step = train_step


def told_of_resume(folder: Path, caplog: pytest.LogCaptureFixture, model: Any, optimizer: Any) -> tuple[Any, list[str]]:
    """Return the weights of a run in two parts, and the warnings of the second."""
    for _ in range(2):
        caplog.clear()
        run = Classifies.add_on(StateManagerAddon)(
            model, "cpu", optimizer=optimizer, seed=0, save_path=folder, resume="auto", log_bar=False
        )
        run.run(2, BATCHES, max_steps=2)
    return run.unwrap().state_dict(), [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def small() -> nn.Module:
    return nn.Linear(4, 2)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor, SavedMomentum])
def test_a_resume_names_nothing_of_an_optimizer_that_saves_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    assert told_of_resume(tmp_path, caplog, small, kind)[1] == []


def test_a_resume_names_what_an_optimizer_keeps_beside_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch's own resume, which loses it in silence, this one has no place to take it from."""
    (told,) = told_of_resume(tmp_path, caplog, small, Momentum)[1]
    names = "\"optimizer['0'].count\", \"optimizer['0'].means\", \"optimizer['0'].stream\""
    assert told.startswith(f"the state that this run resumes from lacks {names}, which had changed")


def test_a_resume_of_lazy_modules_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their first forward gives them another class and other attributes, in each process."""

    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2))

    assert told_of_resume(tmp_path, caplog, lazy, torch.optim.Adam)[1] == []
