"""save_weights_every: files of weights alone beside the checkpoints."""

import errno
import os
import shutil
import signal

import pytest
from safetensors.torch import load_file

from kit import faults, hand
from kit.faults import Child
from kit.table import Task, parts
from zae import ConfigError, Every
from zae.addons import EMAAddon, StateManagerAddon
from zae.addons.state_manager.checkpointer import weight_files
from zae.checkpoint.filesystem import FileSystem
from zae.doctor.checkpoints import examine
from zae.errors import CheckpointError


def make(folder, *add_ons, **options):
    model, optimizer = parts()
    given = {"save_every": Every(epochs=2), "keep_best": 0, "save_weights_every": 2, **options}
    return Task.add_on(StateManagerAddon, *add_ons)(
        model, "cpu", optimizer=optimizer, seed=5, log_bar=False, save_path=folder, **given
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_files_of_weights_are_named_by_step_and_load(tmp_path):
    trainer = make(tmp_path, keep_weights=2)
    seen = {}
    trainer.on_step_end = lambda outputs: seen.update({trainer.progress_checker.step: hand.digest(trainer.unwrap())})
    trainer.run(2, hand.loader())
    assert names(tmp_path) == ["step-00000012", "weights-00000010.safetensors", "weights-00000012.safetensors"]
    other, _ = parts(seed=2)
    other.load_state_dict(load_file(tmp_path / "weights-00000010.safetensors"))
    assert hand.digest(other) == seen[10]
    assert examine(tmp_path)["weights"] == names(tmp_path)[1:]
    started = make(tmp_path / "other", start_from=tmp_path / "weights-00000010.safetensors", save_weights_every=None)
    with started.ready():
        assert hand.digest(started.unwrap()) == seen[10]
        assert started.progress_checker.step == 0


def test_a_resumed_run_makes_the_same_files(tmp_path):
    make(tmp_path / "a", save_every=5, keep_last=9).run(2, hand.loader())
    straight = {path.name: path.read_bytes() for path in (tmp_path / "a").glob("weights-*")}
    for name in ("step-00000010", "step-00000012", "step-00000006"):
        shutil.rmtree(tmp_path / "a" / name, ignore_errors=True)
    resumed = make(tmp_path / "a", save_every=5, keep_last=9, resume="auto", save_weights_every=6)
    resumed.run(2, hand.loader())
    assert names(tmp_path / "a")[-3:] == ["weights-00000004.safetensors", "weights-00000006.safetensors",
                                          "weights-00000012.safetensors"]  # fmt: skip
    assert {name: straight[name] for name in straight if (tmp_path / "a" / name).exists()} == {
        path.name: path.read_bytes() for path in (tmp_path / "a").glob("weights-*")
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_the_checkpoint_of_the_same_step_loses_no_file(when, tmp_path):
    options = {"save_every": 1, "save_weights_every": 3, "resume": "auto"}

    def run_until_killed():
        trainer = make(tmp_path / "killed", **options)
        save_state = trainer.save_state

        def save():
            if when == "after":
                save_state()
            if trainer.progress_checker.step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "before":
                save_state()

        trainer.save_state = save
        trainer.run(2, hand.loader())

    assert Child(run_until_killed).wait().status == -signal.SIGKILL
    for folder in (folders := ("killed", "whole")):
        make(tmp_path / folder, **options).run(2, hand.loader())
    killed, whole = ({path.name: path.read_bytes() for path in (tmp_path / each).glob("weights-*")} for each in folders)
    assert "weights-00000006.safetensors" in whole
    assert killed == whole


def test_an_epoch_is_one_occasion_and_the_format_is_that_of_the_checkpoints(tmp_path):
    make(tmp_path, EMAAddon, save_weights_every=Every(epochs=1), save_format="ckpt").run(2, hand.loader())
    assert names(tmp_path) == ["step-00000012", "weights-00000006.ckpt", "weights-00000012.ckpt"]


def test_files_of_another_run_are_refused_or_replaced(tmp_path):
    make(tmp_path, save_weights_every=5).run(2, hand.loader())
    shutil.rmtree(tmp_path / "step-00000012")
    with pytest.raises(ConfigError, match=r"contains 2 files of weights of another run \(newest: weights-00000010"):
        make(tmp_path).run(1, hand.loader())
    make(tmp_path, overwrite=True, save_weights_every=4).run(1, hand.loader())
    assert names(tmp_path) == ["step-00000006", "weights-00000004.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_weights_every": None, "keep_weights": 3}, "keep_weights=3 keeps nothing; write save_weights_every"),
        ({"keep_weights": 0}, "keep_weights=0"),
        ({"keep_best_weights": 2}, "keep_best_weights=2, but all files are kept; write keep_weights=1 too"),
        ({"save_weights_every": 0}, "save_weights_every"),
        ({"start_from": "w.txt"}, "unknown suffix '.txt'"),
        ({"start_from": "w.ckpt", "start_with": ("model", "optimizer")}, "is a file of weights, and start_with="),
    ],
)
def test_bad_options_are_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for name in ("w.txt", "w.ckpt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "run", **options)


@pytest.mark.parametrize("what", ["raise", "warn"])
def test_a_disk_that_refuses_leaves_no_file(tmp_path, what, caplog):
    class Refusing(FileSystem):
        def create(self, path):
            if "weights-" in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().create(path)

    trainer = make(tmp_path, on_save_error=what, keep_weights=1)
    with faults.installed(Refusing()):
        if what == "warn":
            trainer.run(1, hand.loader())
            assert caplog.text.count("not saved at step") == 3
            assert names(tmp_path) == ["step-00000006"]
        else:
            with pytest.raises(CheckpointError, match="weights-00000002"):
                trainer.run(1, hand.loader())
    assert not weight_files(tmp_path)


def test_a_plan_says_that_they_are_saved(tmp_path):
    plan = make(tmp_path, keep_weights=2).plan(2, hand.loader())
    assert any(
        "the weights alone are saved too, Every(steps=2), and the newest 2 are kept" in note for note in plan.notes
    )


LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 1.0, 5: 2.0, 6: 6.0}
"""What the validation of each epoch of two steps measures."""


class Measured(Task):
    """A task whose validation measures what is written above."""

    def test_step(self, batch):
        return {"loss": LOSSES[self.progress_checker.epoch]}


def keeps(folder, n_epoch, **options):
    model, optimizer = parts()
    trainer = Measured.add_on(StateManagerAddon)(
        model, "cpu", optimizer=optimizer, seed=5, log_bar=False, save_path=folder, **options
    )
    batches = [*hand.loader()]
    trainer.run(n_epoch, batches[:2], batches[:1])
    return [int(path.stem[-8:]) // 2 for path in weight_files(folder)]


def test_the_best_files_of_weights_are_kept_beside_the_newest(tmp_path):
    """Epochs 4 and 5 are the best of six; they are saved whether or not the cadence says so."""
    options = {"save_weights_every": Every(epochs=1), "keep_weights": 1, "keep_best_weights": 2}
    assert keeps(tmp_path / "all", 6, **options) == [4, 5, 6]
    assert keeps(tmp_path / "only", 6, keep_best_weights=2) == [2, 4]  # Those that were the best so far.
    assert keeps(tmp_path / "rare", 6, **{**options, "save_weights_every": Every(epochs=5)}) == [4, 5]
    assert len(list((tmp_path / "all").glob("step-*"))) == 3


@pytest.mark.parametrize("at", [3, 4])
def test_a_resume_keeps_the_scores_of_files_of_weights(tmp_path, at):
    options = {"save_weights_every": Every(epochs=1), "keep_weights": 1, "keep_best_weights": 2}
    keeps(tmp_path, at, **options)
    assert keeps(tmp_path, 6, resume="auto", **options) == [4, 5, 6]


def test_a_file_that_was_saved_before_its_score_was_known_gets_it(tmp_path):
    """A cadence of steps saves the last step of an epoch before its validation."""
    assert keeps(tmp_path, 6, save_weights_every=2, keep_weights=1, keep_best_weights=1) == [4, 6]
