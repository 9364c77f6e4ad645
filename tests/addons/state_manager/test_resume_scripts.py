"""Scripts of several calls of `run`, some of which end early, killed anywhere and started again."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit import faults, rank_tasks
from zae import Every, Trainer
from zae.addons import EarlyStoppingAddon, MultiGPUAddon, StateManagerAddon


class Killed(BaseException):
    """What stands for a kill: nothing is saved after it."""


class Task(Trainer):
    """A regression with dropout that can be killed, and that stops itself at given steps."""

    unsaved_attributes = ("events",)  # Of each process by itself.
    stop_at: frozenset[int] = frozenset()
    events = kill_at = 0
    by_signal = False

    def event(self) -> None:
        """Count what happens, and end the process there."""
        Task.events += 1
        if self.events == self.kill_at:
            if self.by_signal and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                signal.raise_signal(signal.SIGTERM)
            else:
                raise Killed

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.event()
        if self.progress_checker.step + 1 in self.stop_at:
            self.stop(f"stopped in step {self.progress_checker.step + 1}")
        return {"loss": self.model(batch[0]).square().mean() + random.random() * 1e-3}

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.event()
        return {"loss": 1.0 + (self.progress_checker.step % 5)}

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.event()

    def on_run_end(self) -> None:
        super().on_run_end()
        self.event()


TaskOfTest = Task.add_on(StateManagerAddon, EarlyStoppingAddon)


class Call(NamedTuple):
    """One call of `run`, and what the script does before it."""

    n_epoch: int | None
    max_steps: int | None
    loader: int
    validated: bool
    valid_every: int | None
    before: str


class Script(NamedTuple):
    """What is random in a script."""

    calls: tuple[Call, ...]
    stop_at: frozenset[int]
    patience: int
    save_every: Every
    keep_last: int | None
    scheduled: bool


def draw_script(draw: random.Random) -> Script:
    """A script of one to four calls."""
    calls = []
    for index in range(draw.randint(1, 4)):
        n_epoch = draw.choice((1, 2, 3, None))
        max_steps = draw.randint(1, 7) if n_epoch is None or draw.random() < 0.3 else None
        validated = draw.random() < 0.6
        before = draw.choice(("", "", "lr", "best", "evaluate", "optimizer", "save")) if index else ""
        calls.append(Call(n_epoch, max_steps, draw.randint(0, 2), validated, draw.choice((None, None, 2)), before))
    every = draw.choice((Every(steps=1), Every(steps=2), Every(epochs=1)))
    stop_at = frozenset(draw.sample(range(1, 20), draw.choice((0, 1, 3))))
    return Script(tuple(calls), stop_at, draw.choice((2, 50)), every, draw.choice((2, None)), draw.random() < 0.5)


def play(script: Script, folder: Path, kill_at: int = 0, seed: int = 0, by_signal: bool = False) -> dict[str, Any]:
    """Run a script from its first line, as a new process does."""
    Task.events, Task.kill_at, Task.stop_at, Task.by_signal = 0, kill_at, script.stop_at, by_signal
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    loaders = [
        DataLoader(TensorDataset(torch.randn(size, 2, generator=torch.Generator().manual_seed(size))), 2, shuffle=True)
        for size in (6, 8, 6)
    ]
    valid = DataLoader(TensorDataset(torch.randn(4, 2)), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if script.scheduled else None
    faults.ambient(seed)
    trainer = TaskOfTest(
        model, "cpu", optimizer=optimizer, scheduler=scheduler, seed=3, log_bar=False, save_path=folder,
        save_every=script.save_every, keep_last=script.keep_last, resume="auto", patience=script.patience,
    )  # fmt: skip
    for call in script.calls:
        if call.before == "best" and trainer.best_path is not None:
            trainer.restore_best()
        elif call.before == "evaluate":
            trainer.evaluate(valid)
        elif call.before == "save":
            trainer.save_state()
        elif call.before == "lr":
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.5
        elif call.before == "optimizer" and not script.scheduled:
            trainer.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        trainer.run(
            call.n_epoch, loaders[call.loader], valid if call.validated else None, max_steps=call.max_steps,
            valid_every=call.valid_every,
        )  # fmt: skip
    return {**faults.everything(trainer), "step": trainer.progress_checker.step}


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """What stands in a folder, by the time of its last change."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("number", range(10))
def test_a_script_killed_anywhere_ends_as_if_it_was_not(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Calls that ended early are over for good, whenever the script is started again."""
    draw = random.Random(number)
    script = draw_script(draw)
    folder = faults.memory_folder()
    try:
        whole = play(script, folder / "whole")
        count, before = Task.events, files_in(folder / "whole")
        assert play(script, folder / "whole", seed=1) == whole, "a finished script that is run again changes nothing"
        assert files_in(folder / "whole") == before
        for first in draw.sample(range(1, count + 1), min(count, 6)):
            place = folder / str(first)
            for life, kill_at in enumerate((first, draw.randint(1, count))):
                try:
                    play(script, place, kill_at, seed=10 + life, by_signal=draw.random() < 0.3)
                except (Killed, SystemExit):
                    continue
                break
            assert play(script, place, seed=99) == whole, (script, first)
            shutil.rmtree(place)
        assert "overrides" not in caplog.text, "nothing in the script has changed"
    finally:
        shutil.rmtree(folder)


class Failing(rank_tasks.Task):
    """Its first run ends early, and its second one fails where it is told to."""

    fail_at = -1

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == self.fail_at:
            raise RuntimeError("failed as it was told to")
        return super().train_step(batch)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.progress_checker.epoch == 1 and self.rank == 1:
            self.stop("one rank has enough")


@pytest.mark.exhaustive
def test_several_ranks_pass_over_a_call_that_ended_early(tmp_path: Path) -> None:
    """The same on two ranks, which are started for each call; and the learning rate is halved once."""

    def play(folder: Path, fail_at: int = -1) -> Any:
        Failing.fail_at = fail_at
        trainer = rank_tasks.build(
            Failing, (MultiGPUAddon, StateManagerAddon), ["cpu", "cpu"], seed=1, save_path=folder, save_every=1,
            resume="auto",
        )  # fmt: skip
        loader = rank_tasks.loader(16, 2, 3)
        trainer.run(3, loader)
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
        trainer.run(2, loader)
        return (
            rank_tasks.weights(trainer),
            trainer.progress_checker.state_dict(),
            trainer.optimizer.param_groups[0]["lr"],
        )

    with rank_tasks.forks():
        whole = play(tmp_path / "whole")
        with pytest.raises(RuntimeError, match="as it was told"):
            play(tmp_path / "killed", 6)
        again = play(tmp_path / "killed")
    assert rank_tasks.same(whole[0], again[0])
    assert whole[1:] == again[1:]
    assert whole[1]["step"] == 12
