"""A signal in a validation: that is given up between two batches, the resumed run makes it first, and ends the same."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from kit.faults import answer, everything, forked
from kit.loggers import lines
from kit.rank_tasks import forks
from zae import Every
from zae.addons import EarlyStoppingAddon, EMAAddon, StateManagerAddon
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon
from zae.addons.mpu import MultiGPUAddon
from zae.checkpoint.folder import list_checkpoints, newest_valid
from zae.checkpoint.reader import load_checkpoint

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
BATCHES = 10  # Of the validation.


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Watched(faults.Task):
    """Sends itself a signal in a batch of a validation; what is tested, and what ends, is noted in a file."""

    def __init__(self, *args: Any, notes: Path, at: Any = None, number: int = TERM, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes, self.at, self.number = notes, at, number
        self.tested: Counter[int] = Counter()

    def note(self, *what: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def noted(self) -> list[Any]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    def test_step(self, batch: Any) -> dict[str, Any]:
        step = self.progress_checker.step
        if self.at == (step, self.tested[step]):
            os.kill(os.getpid(), self.number)
        self.note("tested", step, self.tested[step])
        self.tested[step] += 1
        out = super().test_step(batch)
        return {**out, "loss": out["loss"] * (1 + random.random() * 1e-2 + float(torch.rand(())) * 1e-2)}

    def metric_on_epoch_end(self) -> dict[str, float]:
        """One that a validation takes of what was trained before it."""
        return {"of training": sum(self.log_train["noise"])} if self.mode == "test" else {}

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.note("end", self.progress_checker.epoch)


class Case:
    """One way to train and to validate, and the steps whose validations are cut short."""

    def __init__(self, *add_ons: type, at: tuple[int, ...] = (6, 18), plateau: bool = False, **options: Any) -> None:
        self.add_ons, self.at, self.plateau = (StateManagerAddon, JSONLLoggerAddon, *add_ons), at, plateau
        names = ("max_steps", "valid_every", "steps_per_epoch", "loaders")
        self.run_options = {name: options.pop(name) for name in names if name in options}
        self.options = options

    def valid(self) -> Any:
        if self.run_options.get("loaders"):
            return {"one": hand.loader(8, 2, seed=8), "two": hand.loader(12, 2, seed=9)}
        return hand.loader(20, 2, seed=8, shuffle=False)

    def run(self, folder: Path, seed: int, cls: Any = Watched, **more: Any) -> Any:
        """Train to the end, in this process."""
        faults.ambient(seed)
        model = faults.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        options: dict[str, Any] = {"save_path": folder / "run", "save_every": Every(epochs=9), "resume": "auto"}
        options |= {"jsonl_path": folder / "log.jsonl", "log_every": 2, "seed": 7, "log_bar": False, **self.options}
        trainer = cls.add_on(*self.add_ons)(
            model, "cpu", optimizer=optimizer, scheduler=plateau if self.plateau else None,
            notes=folder / "notes", **options | more,
        )  # fmt: skip
        run_options = {name: value for name, value in self.run_options.items() if name != "loaders"}
        metrics = trainer.run(3, hand.loader(), self.valid(), **run_options)
        best = load_checkpoint(trainer.best_path)
        return {
            **everything(trainer), "rates": [group["lr"] for group in optimizer.param_groups],
            "stopped": (metrics["step"], metrics["stop_reason"]), "validations": [len(trainer.valid_history)],
            "best": (trainer.best_path.name, best[0]["info"]["score"], faults.fingerprint(dict(best[1]))),
            "lines": lines(folder / "log.jsonl"),
            "ends": [line[1] for line in trainer.noted() if line[0] == "end"],
        }  # fmt: skip


CASES = {
    "plain": Case(at=(6, 12, 18)),
    "judged": Case(EarlyStoppingAddon, plateau=True, patience=1, keep_best=2, save_every=2),
    "averaged": Case(EMAAddon, decay=0.5, save_async=True),
    "by steps": Case(EMAAddon, decay=0.5, plateau=True, valid_every=4, max_steps=16, at=(4, 12, 16)),
    "epochs of so many steps": Case(valid_every=2, steps_per_epoch=4, save_every=1, at=(4, 6, 12)),
    "at the end of all": Case(valid_every=6, max_steps=12, at=(6, 12)),
    "several loaders": Case(loaders=True, keep_best=2, at=(12,)),
}


@functools.cache
def straight(case: Case) -> Any:
    """Return the end of a case that nothing has disturbed."""
    with tempfile.TemporaryDirectory(prefix="zae-") as folder:
        return answer(case.run, Path(folder), 1)


def cut_short(case: Case, folder: Path, step: int, at: int, number: int = TERM) -> None:
    """Live until a signal comes in a validation, which must see no more batches."""
    outcome = forked(lambda: case.run(folder, 100 + step + at, at=(step, at), number=number) and None)
    assert outcome.status == {TERM: 143, INT: 130, KILL: -KILL}[number], outcome.error
    last = json.loads((folder / "notes").read_text().splitlines()[-1])
    assert last == ["tested", step, at - (number == KILL)]
    assert at < BATCHES - 1
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == step
    assert not list((folder / "run").glob("crash-*"))
    assert number == KILL or not (folder / "run" / ".lock").exists()


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("name", list(CASES))
def test_a_validation_is_given_up_and_made_first(folder: Path, name: str) -> None:
    """Signalled in validations, and killed in one that was resumed: bitwise the same."""
    case = CASES[name]
    whole = straight(case)
    for index, step in enumerate(case.at):
        cut_short(case, folder, step, 5)
        if index == 0:
            cut_short(case, folder, step, 1, INT)
            cut_short(case, folder, step, 7, KILL)
    assert answer(case.run, folder, 999) == whole
    assert whole["ends"] == list(range(1, len(whole["ends"]) + 1))
    assert answer(case.run, folder, 1000) == whole, "it has ended, and nothing is left to do"


class InStep(Watched):
    """The signal comes in a step of training, which a validation follows at once."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.at == self.progress_checker.step + 1:
            os.kill(os.getpid(), self.number)
        return super().train_step(batch)


@pytest.mark.parametrize(("name", "step"), [("plain", 12), ("by steps", 8)])
def test_a_signal_in_the_step_before_a_validation(folder: Path, name: str, step: int) -> None:
    """No batch of that validation is tested, and the end is the same."""
    case = CASES[name]
    whole = straight(case)
    outcome = forked(lambda: case.run(folder, 5, InStep, at=step) and None)
    assert outcome.status == 143, outcome.error
    noted = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    assert max(line[1] for line in noted if line[0] == "tested") == step - (6 if name == "plain" else 4)
    assert answer(case.run, folder, 6) == whole


class Fails(Watched):
    """Fails in the validation after step 12, in its fourth batch."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        out = super().test_step(batch)
        if self.tested[12] == 4:
            raise RuntimeError("in a validation")
        return out


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("name", ["plain", "by steps"])
@pytest.mark.parametrize("signalled", [False, True])
def test_what_a_failed_validation_leaves(folder: Path, name: str, signalled: bool) -> None:
    """An error leaves a crash slot that resumes the validation; with a signal, as when the system has
    hit the loader's workers too, a regular checkpoint."""
    case = CASES[name]
    whole = straight(case)
    outcome = forked(lambda: case.run(folder, 5, Fails, at=(12, 3) if signalled else None) and None)
    assert outcome.status == (143 if signalled else 1), outcome.error
    assert signalled or "RuntimeError: in a validation" in outcome.error
    left = sorted(path.name for path in (folder / "run").glob("*-00000012"))
    assert left == ["step-00000012" if signalled else "crash-00000012"]
    more = {} if signalled else {"resume": folder / "run" / left[0], "overwrite": True}
    assert answer(lambda: case.run(folder, 6, **more)) == whole


def test_a_signal_to_the_workers_of_a_validation_too(folder: Path) -> None:
    """The system signals the whole group: the loader's workers die, the run saves and ends."""

    class Group(Watched):
        def test_step(self, batch: Any) -> dict[str, Any]:
            if self.at == self.tested[self.progress_checker.step]:
                os.killpg(os.getpid(), TERM)
            return super().test_step(batch)

    whole = straight(CASES["plain"])
    case = Case(at=(6,))
    case.valid = lambda: hand.loader(20, 2, seed=8, shuffle=False, num_workers=2)  # type: ignore[method-assign]
    outcome = forked(lambda: case.run(folder, 5, Group, at=2) and None)
    assert outcome.status == 143, outcome.error
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert (newest[1]["step"], not list((folder / "run").glob("crash-*"))) == (6, True)
    assert answer(CASES["plain"].run, folder, 6) == whole


def test_evaluations_by_hand_are_not_given_up(folder: Path) -> None:
    """One within a run is finished before its end; outside of a run Ctrl-C interrupts at once."""

    class ByHand(Watched):
        def on_epoch_end(self) -> None:
            if self.progress_checker.epoch == 2:
                self.tested.clear()
                self.at = (12, 1)  # In the second batch of what follows.
                self.note("whole", self.evaluate(self.other)["hit"] >= 0)
                self.at = None
            super().on_epoch_end()

        @property
        def other(self) -> Any:
            return hand.loader(12, 2, seed=5)

    outcome = forked(lambda: CASES["plain"].run(folder, 1, ByHand) and None)
    assert outcome.status == 143, outcome.error
    noted = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    assert noted[-3:] == [["tested", 12, 5], ["whole", True], ["end", 2]]

    def alone() -> None:
        trainer = Watched(faults.classifier(), "cpu", mode="test", notes=folder / "alone", at=(0, 1), number=INT)
        trainer.evaluate(hand.loader(12, 2, seed=5))

    assert forked(alone).status == 130
    assert (folder / "alone").read_text() == '["tested", 0, 0]\n'


def test_the_call_of_run_that_it_is_of(folder: Path) -> None:
    """A script of two calls validates in the second."""

    def script(place: Path, seed: int, **more: Any) -> Any:
        faults.ambient(seed)
        model = faults.classifier()
        trainer = Watched.add_on(StateManagerAddon)(
            model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), notes=place / "notes",
            save_path=place / "run", resume="auto", seed=7, log_bar=False, **more,
        )  # fmt: skip
        trainer.run(1, hand.loader(), hand.loader(8, 2, seed=4))
        trainer.run(2, hand.loader(), hand.loader(20, 2, seed=8))
        state = trainer.state_dict()
        assert "validation" not in state
        return everything(trainer)

    whole = answer(script, made(folder / "whole"), 1)
    assert forked(lambda: script(folder, 2, at=(12, 3)) and None).status == 143
    loaded = load_checkpoint(folder / "run" / "step-00000012")[2]
    assert (loaded["validation"], loaded["progress"]["stop_reason"]) == ("epoch", None)
    assert answer(script, folder, 3) == whole


def test_where_nothing_can_be_validated_and_where_the_epoch_begins_again(folder: Path) -> None:
    """Without its loader a run omits it; mid_epoch="restart" validates, and begins the epoch again."""
    bare = Case(at=(12,))
    cut_short(bare, folder, 12, 3)
    bare.valid = lambda: None  # type: ignore[method-assign]
    ended = answer(bare.run, folder, 3)
    assert (ended["validations"], ended["ends"], ended["stopped"]) == ([1], [1, 2, 3], (18, None))

    case, again = CASES["by steps"], made(folder / "again")
    cut_short(case, again, 4, 3)
    ended = answer(lambda: case.run(again, 3, mid_epoch="restart"))
    assert [line["step"] for line in ended["lines"] if "valid/loss" in line] == [4, 8, 12, 16]
    assert ended["ends"] == [1, 2]


@pytest.mark.parametrize("place", ["train", "valid"])
def test_workers_that_persist_and_a_process_that_goes_on(folder: Path, place: str) -> None:
    """In a notebook Ctrl-C ends a run, and the next one asks the same loader, whose workers were told to end."""

    class Interrupted(Watched):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if place == "train" and self.progress_checker.step == 2 and self.at:
                self.at = os.kill(os.getpid(), INT)
            return super().train_step(batch)

    def notebook() -> Any:
        ignored: list[Any] = []
        sys.unraisablehook = ignored.append
        model = faults.classifier()
        trainer = Interrupted.add_on(StateManagerAddon)(
            model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), notes=folder / "notes",
            at=(6, 1), number=INT, save_path=folder / "run", log_bar=False,
        )  # fmt: skip
        loader, valid = (hand.loader(size, 4, num_workers=1, persistent_workers=True) for size in (22, 20))
        with pytest.raises(KeyboardInterrupt):
            trainer.run(2, loader, valid)
        interrupted = trainer.progress_checker.step
        trainer.at = None
        metrics = trainer.run(2, loader, valid)
        assert not ignored
        return interrupted, metrics["step"], [row["step"] for row in metrics["valid_metrics_history"]]

    expected = (3, 12, [6, 12]) if place == "train" else (6, 18, [6, 12, 18])
    assert answer(notebook) == expected


class OfTwo(faults.Task):
    """One of two ranks; the second gets the signal, and both note what they test."""

    notes: Path
    at = -1

    def test_step(self, batch: Any) -> dict[str, Any]:
        index = len(self.log_test["loss"]) if len(self.log_test) else 0
        if (self.progress_checker.step, index, self.rank) == (self.at, 3, 1):
            os.kill(os.getpid(), TERM)
        with self.notes.open("a") as file:
            file.write(f"{self.rank} {self.progress_checker.step} {index}\n")
        return super().test_step(batch)


def two_ranks(folder: Path, seed: int, at: int) -> Any:
    """Two epochs with a validation of three loaders; one rank has no batch of the first, and fewer of the second."""
    faults.ambient(seed)
    model = faults.classifier()
    trainer = OfTwo.add_on(StateManagerAddon, EMAAddon, MultiGPUAddon)(
        model, ["cpu", "cpu"], optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), seed=7, log_bar=False,
        save_path=folder / "run", resume="auto", timeout=120.0, decay=0.5,
    )  # fmt: skip
    trainer.notes, trainer.at = folder / "notes", at
    sizes = {"one": 2, "two": 38, "three": 8}
    valid = {name: hand.loader(size, 2, seed=8, shuffle=False) for name, size in sizes.items()}
    with forks():
        trainer.run(2, hand.loader(), valid)
    state = trainer.state_dict()["MultiGPUAddon"]
    assert state["world_size"] == len(state["ranks"]) == 2
    return everything(trainer), trainer.valid_history, trainer.best_path.name


def test_two_ranks_give_a_validation_up_together(folder: Path) -> None:
    """A signal to one rank in its fourth batch of a loader: both leave before the fifth; bitwise then."""
    whole = two_ranks(made(folder / "whole"), 1, -1)
    with pytest.raises(SystemExit) as caught:
        two_ranks(folder, 2, 3)
    assert caught.value.code == 143
    tested = (folder / "notes").read_text().splitlines()
    assert sorted(tested) == ["0 3 0", *(f"0 3 {index}" for index in range(4)), *(f"1 3 {index}" for index in range(4))]
    assert [path.name for path in list_checkpoints(folder / "run")] == ["step-00000003"]
    assert load_checkpoint(folder / "run" / "step-00000003")[2]["validation"] == "epoch"
    assert two_ranks(folder, 3, -1) == whole
