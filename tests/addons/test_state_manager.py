"""Checkpoints: which are kept, what they hold, and going on from them. Faults are attacked in their own tests."""

from __future__ import annotations

import copy
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.optim import AdamW

from kit import hand
from kit.faults import RefusingDisk, installed
from kit.hand import digest, loader, network
from kit.table import Task, core_of, fingerprint
from zae import AddOnBase, ConfigError, Every
from zae.addons import EarlyStoppingAddon, EMAAddon, StateManagerAddon
from zae.addons.state_manager.addon import format_for
from zae.checkpoint.reader import load_checkpoint
from zae.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound
from zae.random_state import seed_everything


class Scored(Task):
    """Its validations score what is told, by the number of the epoch."""

    scores: tuple[float, ...] = ()

    def test_step(self, batch: Any) -> Any:
        return {"loss": self.scores[self.progress_checker.step - 1]} if self.scores else super().test_step(batch)


def build(folder: Any, scores: Any = (), *more: Any, task: Any = Scored, **options: Any) -> Any:
    task = type("Told", (task,), {"scores": tuple(scores), "__module__": __name__})
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.05)
    return task.add_on(StateManagerAddon, *more)(model, "cpu", optimizer=optimizer, save_path=folder, **options)


def names(folder: Path) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if path.name.startswith("step-")}


def valid() -> Any:
    return loader(10, seed=9, shuffle=False)


@given(
    scores=st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan]), min_size=1, max_size=6),
    last=st.integers(1, 3),
    best=st.integers(0, 2),
    larger=st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_resume_the_last_and_the_best_are_kept(scores: Any, last: int, best: int, larger: bool, tmp_path: Path) -> None:
    """For any scores the files are exactly last-n and best-m; best_path and last_path are there."""
    folder = tmp_path / "states"
    shutil.rmtree(folder, ignore_errors=True)
    trainer = build(folder, scores, keep_last=last, keep_best=best, monitor_mode="max" if larger else "min")
    on_epoch_end = trainer.on_epoch_end

    def look(done: int) -> None:
        ranked = sorted(
            (score * (-1 if larger else 1), i) for i, score in enumerate(scores[:done]) if not math.isnan(score)
        )
        kept = {i for _, i in ranked[:best]} | set(range(max(0, done - last), done))
        assert names(folder) == {f"step-{i + 1:08d}" for i in kept}
        assert trainer.last_path == folder / f"step-{done:08d}"
        assert trainer.best_path is None or trainer.best_path.is_dir()
        if best and ranked:
            assert trainer.best_path == folder / f"step-{ranked[0][1] + 1:08d}"

    def end() -> None:
        on_epoch_end()
        if trainer.progress_checker.epoch > 1:
            look(trainer.progress_checker.epoch - 1)

    trainer.on_epoch_end = end
    trainer.run(len(scores), loader(4), loader(4))
    look(len(scores))


@pytest.mark.parametrize("save_format", ["safetensors", "safetensor", ".safetensors", "ckpt", ".ckpt"])
def test_the_formats(save_format: str, tmp_path: Path) -> None:
    """The model's own keys, in a file that plain libraries read."""
    trainer = build(tmp_path / "states", save_format=save_format)
    trainer.run(1, loader())
    [path] = (tmp_path / "states").glob("step-*")
    suffix = "ckpt" if "ckpt" in save_format else "safetensors"
    file = path / f"model.{suffix}"
    weights = load_file(file) if suffix == "safetensors" else torch.load(file, weights_only=True)
    plain = network(9)
    plain.load_state_dict(weights, strict=True)
    assert digest(plain) == digest(trainer.model)


@pytest.mark.parametrize("save_format", ["safetensorz", "pickle", "", None, 3])
def test_fault_a_format_that_is_none_is_refused_at_construction(save_format: Any, tmp_path: Path) -> None:
    """Nothing is made."""
    with pytest.raises(ValueError, match="save_format"):
        build(tmp_path / "states", save_format=save_format)
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("more", [(), (EMAAddon,)])
def test_resume_restore_best_reproduces_its_score(more: Any, tmp_path: Path) -> None:
    """Exactly, with an average in the evaluation too; and training may continue from it."""
    options = {"decay": 0.5} if more else {}
    trainer = build(tmp_path, (), *more, keep_last=1, keep_best=1, **options)
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint in .* has a score"):
        trainer.restore_best()
    metrics = trainer.run(6, loader(), valid(), valid_every=4)
    best = metrics["best_valid"]
    path = trainer.restore_best()
    assert path == trainer.best_path == tmp_path / f"step-{best['step']:08d}"
    assert trainer.evaluate(valid())["loss"] == best["score"]
    assert min(row["valid_loss"] for row in metrics["valid_metrics_history"]) == best["score"]
    trainer.run(1, loader())


@pytest.mark.parametrize("more", [(), (EMAAddon,)])
@pytest.mark.parametrize("resume", [True, "auto"])
def test_resume_the_best_of_a_run_in_another_process(resume: Any, more: Any, tmp_path: Path) -> None:
    """A script that only evaluates; the newest is taken up first, and does not come back over the best."""
    scores, options = (3.0, 1.0, 2.0), {"decay": 0.5} if more else {}
    first = build(tmp_path, scores, *more, **options)
    first.run(3, loader(4), loader(4))
    best = first.restore_best()
    later = build(tmp_path, scores, *more, resume=resume, **options)
    assert later.restore_best() == best != first.last_path
    assert digest(later.model) == digest(first.model)
    later.evaluate(loader(4))
    assert digest(later.model) == digest(first.model)
    with pytest.raises(
        CheckpointNotFound, match=r"contains 2 checkpoints of another run.*; write resume=True to continue"
    ):
        build(tmp_path, scores, *more, **options).restore_best()
    with pytest.raises(CheckpointNotFound, match="has a score: no validation has been made"):
        build(tmp_path / "none", scores, *more, resume="auto", **options).restore_best()


@pytest.mark.parametrize(("direction", "scores"), [("min", (3.0, 1.0, 2.0)), ("max", (1.0, 3.0, 2.0))])
def test_restore_best_without_the_best_says_so(direction: str, scores: Any, tmp_path: Path, caplog: Any) -> None:
    """With keep_best=0 it loads nothing worse, in another process either; where it was deleted, it says what comes."""
    options: dict[str, Any] = {"monitor_mode": direction, "keep_best": 0, "keep_last": 1}
    trainer = build(tmp_path / "none", scores, **options)
    trainer.run(3, loader(4), loader(4))
    before, says = digest(trainer.model), r"best has loss=[13], in step 2.*step-00000003, .*has 2\. Write keep_best=1"
    for each in (trainer, build(tmp_path / "none", scores, resume=True, **options)):
        with pytest.raises(CheckpointNotFound, match=says):
            each.restore_best()
    assert digest(trainer.model) == before
    trainer = build(tmp_path / "all", scores, monitor_mode=direction, keep_last=None)
    trainer.run(3, loader(4), loader(4))
    assert trainer.restore_best().name == "step-00000002"
    assert not caplog.records
    shutil.rmtree(tmp_path / "all" / "step-00000002")
    assert trainer.restore_best().name == "step-00000003"
    assert "in step 2, and no checkpoint of it is there; step-00000003" in caplog.text


class Both(Scored):
    """What is told is its accuracy, and half of it its loss: the best by one is the worst by the other."""

    def test_step(self, batch: Any) -> Any:
        told = super().test_step(batch)["loss"]
        return {"loss": told / 2, "accuracy": told}


def test_resume_another_monitor_judges_what_was_saved_anew(tmp_path: Path, caplog: Any) -> None:
    """Scores of two monitors do not compare: the best is that of the new one, and patience begins again."""
    scores = (0.2, 0.8, 0.4, 0.6, 0.5)
    make = partial(build, tmp_path, scores, EarlyStoppingAddon, task=Both, keep_last=None, patience=4)
    first = make(monitor="accuracy")
    first.run(3, loader(4), loader(4))
    assert (first.best["score"], first.restore_best().name) == (0.8, "step-00000002")
    assert "determined again" not in caplog.text
    other = make(resume="auto")  # By "loss", of which less is better.
    assert other.restore_best().name == "step-00000001"
    assert (other.best["score"], other.best["epoch"], other.best["loss"]) == (0.1, 1, 0.1)
    told = "saved with monitor='accuracy' ('max'), and here it is 'loss' ('min'): the best epoch so far is"
    assert told in caplog.text
    metrics = make(resume="auto").run(5, loader(4), loader(4))
    assert (metrics["best_valid"]["score"], metrics["epoch"], metrics["stop_reason"]) == (0.1, 5, None)


def test_paths_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path that may be given is meant alike: none makes a folder that is called ~."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainer = build("~/run", (), EMAAddon)
    trainer.run(1, loader())
    saved = trainer.save_state("~/kept")
    assert saved == tmp_path / "home/kept"
    build("~/other", (), EMAAddon, resume="~/kept").run(2, loader())
    other = build("~/third", (), EMAAddon)
    other.load_state("~/run")
    assert digest(other.model) == digest(trainer.model)
    for suffix in ("safetensors", "pt"):
        assert trainer.save_model(f"~/model.{suffix}") == tmp_path / f"home/model.{suffix}"
        assert trainer.save_average(f"~/average.{suffix}").parent == tmp_path / "home"
        assert other.apply_weights(f"~/average.{suffix}") == ([], [])
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("every", [1, 4, Every(epochs=1), Every(epochs=2)])
@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_resumed_run_ends_like_the_whole_one(every: Any, stop: int, tmp_path: Path) -> None:
    """From the newest checkpoint that there is, or from the start."""
    # All streams: one that begins afresh keeps those of Python and NumPy, from which other libraries draw as well.
    whole = build(tmp_path / "whole", (), EMAAddon, decay=0.5, save_every=every, log_every=4)
    seed_everything(3)
    whole.run(3, loader(), valid())

    class Killed(Exception):
        pass

    first = build(tmp_path / "cut", (), EMAAddon, decay=0.5, save_every=every, log_every=4)
    checkpoint = first.checkpoint

    def kill() -> None:
        checkpoint()
        if first.progress_checker.step == stop and first.progress_checker.epoch_batch in (stop % 6, 0):
            raise Killed

    first.checkpoint = kill
    seed_everything(3)
    with pytest.raises(Killed):
        first.run(3, loader(), valid())
    second = build(tmp_path / "cut", (), EMAAddon, decay=0.5, save_every=every, log_every=4, resume="auto")
    seed_everything(3)
    metrics = second.run(3, loader(), valid())
    assert metrics["step"] == 18
    assert fingerprint(core_of(second)) == fingerprint(core_of(whole))
    again = build(tmp_path / "cut", (), EMAAddon, decay=0.5, save_every=every, log_every=4, resume=True)
    before = names(tmp_path / "cut")
    assert again.run(3, loader(), valid())["step"] == 18
    assert names(tmp_path / "cut") == before


def test_a_long_history_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """Hundreds of records of several kinds, kept as columns, are the same to the last bit and type."""
    options = {"log_every": 1, "save_every": Every(epochs=2), "save_async": True, "seed": 5}
    whole = build(tmp_path / "whole", **options)
    whole.run(6, loader(240), valid(), valid_every=Every(steps=40))
    build(tmp_path / "cut", **options).run(5, loader(240), valid(), valid_every=Every(steps=40))
    resumed = build(tmp_path / "cut", resume=True, **options)
    resumed.setup()
    at = len(resumed.log_history)
    assert at > 300
    assert repr(resumed.log_history) == repr(whole.log_history[:at])
    saved = load_checkpoint(resumed.last_path)[2]["records"]["log_history"]
    assert repr(saved) == repr(resumed.log_history)
    resumed.run(6, loader(240), valid(), valid_every=Every(steps=40))
    assert repr(resumed.log_history) == repr(whole.log_history)


def test_resume_from_a_path_and_from_nothing(tmp_path: Path) -> None:
    """Nothing is begun afresh unless that is asked for."""
    with pytest.raises(CheckpointNotFound, match="write resume='auto' to start a new run"):
        build(tmp_path / "none", resume=True).run(1, loader())
    first = build(tmp_path / "a")
    first.run(1, loader())
    second = build(tmp_path / "b", resume=first.last_path)
    assert second.run(2, loader())["step"] == 12
    with pytest.raises(ConfigError, match=r"contains 1 checkpoint of another run.*overwrite=True"):
        build(tmp_path / "a").run(1, loader())
    assert build(tmp_path / "a", overwrite=True).run(2, loader())["step"] == 12
    assert names(tmp_path / "a") == {"step-00000006", "step-00000012"}


def test_a_save_that_meets_a_validation_carries_its_score(tmp_path: Path) -> None:
    trainer = build(tmp_path / "valid", save_every=6, keep_last=None, seed=5)
    metrics = trainer.run(3, loader(), valid())
    rows = {f"step-{row['step']:08d}": row["valid_loss"] for row in metrics["valid_metrics_history"]}
    assert trainer.state_dict()["StateManagerAddon"]["scores"] == rows
    told = build(tmp_path / "told", [1.0] * 6 + [3.0] * 6 + [2.0] * 6, save_every=6, keep_last=1, keep_best=2)
    told.run(3, loader(), valid())  # The last step of an epoch is saved, and validated afterwards.
    assert told.state_dict()["StateManagerAddon"]["scores"] == {"step-00000006": 1.0, "step-00000018": 2.0}
    assert load_checkpoint(told.last_path)[0]["info"]["score"] == 2.0
    told.run(1, loader())
    assert names(tmp_path / "told") == {"step-00000006", "step-00000018", "step-00000024"}
    watching = build(tmp_path / "train", monitor="train/loss", keep_last=None)
    watching.run(3, loader(), valid())
    scores = watching.state_dict()["StateManagerAddon"]["scores"]
    assert list(scores.values()) == hand.losses(watching)


def test_a_script_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative save_path is the one of the start, wherever the script goes while it trains."""
    (tmp_path / "elsewhere").mkdir()
    trainer = build("run", keep_last=None)
    on_epoch_end = trainer.on_epoch_end
    trainer.on_epoch_end = lambda: (on_epoch_end(), monkeypatch.chdir(tmp_path / "elsewhere"))
    trainer.run(2, loader())
    assert names(tmp_path / "run") == {"step-00000006", "step-00000012"}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_only_what_a_failed_run_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken by itself, but nobody begins afresh beside it without being told."""
    first = build(tmp_path)
    first.train_step = lambda batch: (
        {"loss": 1 / 0} if first.progress_checker.step == 3 else Task.train_step(first, batch)
    )
    with pytest.raises(ZeroDivisionError):
        first.run(1, loader())
    with pytest.raises(CheckpointNotFound, match=r"crash-00000003' resumes from what a failed run has saved"):
        build(tmp_path, resume=True).run(1, loader())
    build(tmp_path, resume="auto").setup()
    assert [r.levelname for r in caplog.records if "a new run begins; resume=" in r.getMessage()] == ["WARNING"]
    went_on = build(tmp_path, resume=tmp_path / "crash-00000003")
    went_on.setup()
    assert went_on.progress_checker.step == 3


class Fails(Task):
    """Fails in its first step."""

    def train_step(self, batch: Any) -> Any:
        raise KeyError("train_step")


class FailsAt(Task):
    """Fails in a place, from the third step on; its own trainer fails in its loader, or in its step."""

    place = ""
    inner: Any = None

    def fail(self, place: str, least: int = 2) -> None:
        if self.place == place and self.mode == "train" and self.progress_checker.step >= least:
            raise KeyError(place)

    def run_batch(self, batch: Any) -> None:
        try:
            super().run_batch(batch)
        except KeyError as error:
            if self.place == "wrapped":
                raise RuntimeError("in other words") from None
            raise RuntimeError("in other words") from error

    def train_step(self, batch: Any) -> Any:
        self.fail("train_step")
        self.fail("wrapped")
        if self.place == "train_step of another trainer" and self.progress_checker.step == 2:
            self.inner.run(1, loader())
        return super().train_step(batch)

    def optimizer_step(self) -> bool:
        stepped = super().optimizer_step()
        self.fail("optimizer_step")
        return stepped

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        self.fail("logging", 3)

    def log(self, metrics: Any, step: int) -> None:
        super().log(metrics, step)
        self.fail("log", 3)

    def validate(self) -> Any:
        self.fail("validation between steps", 3)
        return super().validate()

    def checkpoint(self) -> None:
        super().checkpoint()
        self.fail("checkpoint", 3)

    def batches(self, loader: Any) -> Any:
        for batch in super().batches(loader):
            self.fail("first batch", 0)
            self.fail("loader")
            if self.place == "loader that trains" and self.progress_checker.step == 2:
                self.inner.run(1, loader)
            if self.place == "loader that trains without add-ons" and self.progress_checker.step == 2:
                model = network()
                Fails(model, "cpu", optimizer=AdamW(model.parameters())).run(1, loader)
            yield batch

    def metric_on_epoch_end(self) -> Any:
        self.fail("metric_on_epoch_end")
        return super().metric_on_epoch_end()

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.fail("on_epoch_end")


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize(
    ("place", "in_step"),
    [
        ("train_step", True),
        ("wrapped", True),
        ("optimizer_step", True),
        ("logging", True),
        ("log", True),
        ("validation between steps", False),
        ("checkpoint", True),
        ("train_step of another trainer", True),
        ("loader that trains", False),
        ("loader that trains without add-ons", False),
        ("loader", False),
        ("metric_on_epoch_end", False),
        ("on_epoch_end", False),
        ("first batch", None),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_whether_a_failed_run_was_in_the_middle_of_a_step(
    place: str, in_step: bool | None, by_hand: bool, tmp_path: Path
) -> None:
    """From the gradients of a step to its end; what fails before the first step leaves nothing.

    A validation is repeated by a resume, so that its state is that between two steps.
    """

    def make(where: str, folder: Path) -> Any:
        model = network()
        made = FailsAt.add_on(StateManagerAddon)(
            model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), save_path=folder, log_every=1
        )
        made.place = where
        return made

    trainer = make(place, tmp_path / "outer")
    trainer.inner = make("train_step", tmp_path / "inner")
    if by_hand:  # Steps that no run has made leave no doubt about the run that comes after them.
        for batch in loader(4):
            trainer.run_batch(batch)
    with pytest.raises((KeyError, RuntimeError)):
        trainer.run(2, loader(), valid(), valid_every=3)
    crashed = sorted((tmp_path / "outer").glob("crash-*"))
    assert [load_checkpoint(path)[0]["info"]["in_step"] for path in crashed] == [in_step] * (in_step is not None)


def test_a_resumed_run_that_does_not_begin_leaves_nothing(tmp_path: Path) -> None:
    """What fails after the state was loaded and before the run begins has trained nothing."""
    build(tmp_path).run(1, loader())
    resumed = build(tmp_path, resume=True)
    resumed.wrap_loader = lambda loader, training: 1 / 0
    with pytest.raises(ZeroDivisionError):
        resumed.run(2, loader())
    assert resumed.progress_checker.step == 6
    assert list(tmp_path.glob("crash-*")) == []


def test_a_signal_before_a_step_that_fails_leaves_no_regular_checkpoint(tmp_path: Path) -> None:
    """Weights of the middle of a step are saved apart; those between two steps are a checkpoint."""
    for place, expected in (("train_step", "crash-00000002"), ("loader", "step-00000002")):
        model = network()
        made = FailsAt.add_on(StateManagerAddon)(
            model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), save_path=tmp_path / place
        )

        def fail(at: str, least: int = 2, made: Any = made, place: str = place) -> None:
            if at == place and made.progress_checker.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
                raise KeyError(place)

        made.fail = fail
        with pytest.raises(SystemExit if place == "loader" else RuntimeError):
            made.run(1, loader())
        assert [path.name for path in (tmp_path / place).glob("[!.]*")] == [expected]


def test_a_checkpoint_that_somebody_removed_is_no_error(tmp_path: Path) -> None:
    """A folder that is tidied up while a run is going on."""
    trainer = build(tmp_path, save_every=1, keep_last=2, keep_best=0)
    checkpoint = trainer.checkpoint

    def tidy() -> None:
        checkpoint()
        if trainer.progress_checker.step == 3 and trainer.progress_checker.epoch_batch:
            shutil.rmtree(tmp_path / "step-00000002")

    trainer.checkpoint = tidy
    trainer.run(1, loader())
    assert names(tmp_path) == {"step-00000005", "step-00000006"}
    scored = build(tmp_path / "scored", keep_last=None, keep_best=3)
    scored.run(2, loader(), valid())
    best = scored.best_path
    shutil.rmtree(best)
    assert scored.restore_best() == scored.best_path != best


def test_save_state_elsewhere_is_not_covered_by_the_rule(tmp_path: Path) -> None:
    trainer = build(tmp_path / "a", keep_last=1, keep_best=0)
    trainer.run(1, loader())
    kept = trainer.save_state(tmp_path / "mine" / "one")
    trainer.run(2, loader())
    assert names(tmp_path / "a") == {"step-00000018"}
    other = build(tmp_path / "b")
    other.load_state(kept)
    assert other.progress_checker.step == 6
    assert other.best_path is None
    other.load_state(tmp_path / "a")
    assert digest(other.model) == digest(trainer.model)


@pytest.mark.parametrize(
    "options",
    [{"keep_last": 0}, {"keep_last": 1.5}, {"keep_best": -1}, {"resume": 3}, {"save_every": 0}, {"save_every": "1"}],
)
def test_options_that_cannot_be_meant(options: Any, tmp_path: Path) -> None:
    """At construction."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        build(tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        build(tmp_path / "file" / "states")


@pytest.mark.parametrize("add_ons", [(), (EMAAddon,)])
def test_a_save_within_an_evaluation_is_refused(add_ons: Any, tmp_path: Path) -> None:
    """Weights are averages then, and random streams the evaluation's: refused in words, the next time too."""
    made = build(tmp_path, (), *add_ons, keep_best=0)
    made.metric_on_epoch_end = lambda: {} if made.mode == "train" else made.save_state() and {}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"an evaluation is running.*on_epoch_end\(\)"):
            made.run(1, loader(), valid())
    assert names(tmp_path) == set()
    made.metric_on_epoch_end = dict
    made.run(1, loader(), valid())
    assert f"step-{made.progress_checker.step:08d}" in names(tmp_path)


class CopyingTask(Task):
    """Copies itself within an evaluation."""

    def metric_on_epoch_end(self) -> dict[str, float]:
        if self.mode == "test":
            self.twins = [copy.deepcopy(self)]
        return {}


def test_a_copy_made_within_an_evaluation_has_its_weights_too(tmp_path: Path) -> None:
    """A copy of the averages is not saved as what training continues from."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = CopyingTask.add_on(StateManagerAddon, EMAAddon)(model, "cpu", optimizer=optimizer, save_path=tmp_path)
    made.evaluate(valid())
    assert not made.current_run.activity.evaluation.is_running
    with pytest.raises(CheckpointError, match="an evaluation is running"):
        made.twins[0].save_state()


def test_a_save_within_a_step_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is saved in the middle of a step does not resume exactly, and one warning for each save says so."""
    made = build(tmp_path, keep_best=0)
    step = made.train_step
    made.train_step = lambda batch: (made.progress_checker.step == 3 and made.save_state(), step(batch))[1]
    made.run(1, loader())
    said = [record.getMessage() for record in caplog.records if "in the middle of a step" in record.getMessage()]
    assert len(said) == 1
    assert "step-00000003" in said[0]


@pytest.mark.parametrize("is_there", [True, False])
def test_links_are_not_taken_for_no_checkpoint(is_there: bool, tmp_path: Path) -> None:
    """Checkpoints that were moved, links in their place: no run from its beginning, nor from an older one."""
    build(tmp_path / "run", keep_last=2, keep_best=0, save_every=4).run(1, loader())
    newest = tmp_path / "run" / "step-00000006"
    if is_there:
        shutil.move(newest, tmp_path / "far")
    else:
        shutil.rmtree(newest)
    newest.symlink_to(tmp_path / "far")
    with pytest.raises(CheckpointNotFound, match=r"is a link.*resume='.*far'"):
        build(tmp_path / "run", resume="auto").run(2, loader())
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    with pytest.raises(CheckpointNotFound, match="is a link"):
        build(tmp_path / "run", resume="auto").run(2, loader())
    if is_there:
        made = build(tmp_path / "run", resume=tmp_path / "far")
        made.run(2, loader())
        assert made.progress_checker.step == 12
        assert build(tmp_path / "run", resume="auto").run(2, loader())["step"] == 12


def test_other_add_ons_than_were_saved(tmp_path: Path) -> None:
    """What a strict resume refuses can be loaded as the note says, and the run continues from there."""
    build(tmp_path).run(1, loader(), valid())
    with pytest.raises(CheckpointMismatch, match="the state has no entry of EMAAddon") as caught:
        build(tmp_path, (), EMAAddon, resume="auto").run(2, loader(), valid())
    assert "trainer.load_state(strict=False) before run()" in caught.value.__notes__[0]
    made = build(tmp_path, (), EMAAddon)
    made.load_state(strict=False)
    assert made.run(1, loader(), valid())["step"] == 12
    assert made.best_path is not None
    with pytest.raises(CheckpointMismatch, match="this trainer has no add-on for the state of EMAAddon") as caught:
        build(tmp_path, resume="auto").run(2, loader(), valid())
    assert "load_state(strict=False)" in caught.value.__notes__[0]


def test_a_format_that_cannot_hold_the_weights_is_refused_at_once(tmp_path: Path) -> None:
    """Of a model, or of a buffer that is saved; one that is not saved does not matter."""

    def made(model: torch.nn.Module, **options: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Task.add_on(StateManagerAddon)(model, "cpu", optimizer=optimizer, save_path=tmp_path / "run", **options)

    wide = torch.nn.Linear(2, 1, dtype=torch.complex128)
    said = "cannot hold torch.complex128, the dtype of 'weight'; write save_format='ckpt'"
    with pytest.raises(ConfigError, match=said):
        made(wide)
    assert not (tmp_path / "run").exists()
    assert made(wide, save_format="ckpt").save_state().is_dir()
    for persistent in (False, True):
        model = torch.nn.Linear(2, 1)
        model.register_buffer("phase", torch.ones(2, dtype=torch.complex128), persistent=persistent)
        if persistent:
            with pytest.raises(ConfigError, match=r"the dtype of 'phase'"):
                made(model)
        else:
            assert made(model).save_state(tmp_path / "other").is_dir()
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2, dtype=torch.complex64))
    assert format_for(lazy, "safetensor") == "safetensors"


class Noting(AddOnBase):
    """Notes each checkpoint that was saved or loaded, with what holds at that moment."""

    layer = "observe"
    unsaved_attributes = ("noted",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noted: list[tuple[str, str, int]] = []

    def on_save(self, path: Path) -> None:
        super().on_save(path)
        assert (path / "manifest.json").exists()
        self.noted.append(("save", path.name, self.progress_checker.step))

    def on_load(self, path: Path) -> None:
        super().on_load(path)
        self.noted.append(("load", path.name, self.progress_checker.step))


def test_on_save_and_on_load_are_called_once_for_each_checkpoint(tmp_path: Path) -> None:
    """After each save, a resume and load_state; not for weights alone, nor for a save that the disk refused."""
    first = build(tmp_path, (), Noting, keep_last=None)
    first.run(2, loader(), valid())
    steps = [int(name[5:]) for name in sorted(names(tmp_path))]
    assert first.noted == [("save", f"step-{step:08d}", step) for step in steps]
    second = build(tmp_path, (), Noting, resume="auto", keep_last=None, on_save_error="warn")
    second.setup()
    assert second.noted == [("load", f"step-{steps[-1]:08d}", steps[-1])]
    second.load_state(tmp_path / f"step-{steps[0]:08d}")
    assert second.noted[1:] == [("load", f"step-{steps[0]:08d}", steps[0])]
    second.restore_best()
    with installed(RefusingDisk(0, 28)):
        second.save_state(tmp_path / "other")
    assert second.noted[2:] == []
    second.save_state(tmp_path / "other")
    assert second.noted[2:] == [("save", "other", steps[0])]
