"""A new run from parts of a checkpoint: the same as by hand, the same when killed, and refused where it cannot be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

from kit import faults, hand, rank_tasks
from zae import Trainer
from zae.addons import EarlyStoppingAddon, EMAAddon, MultiGPUAddon, StateManagerAddon
from zae.checkpoint.folder import list_checkpoints
from zae.checkpoint.manifest import read_manifest
from zae.checkpoint.reader import load_state
from zae.cli import main
from zae.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError

WSD = ("model", "optimizer", "progress")


class Killed(BaseException):
    """What stands for a kill."""


class Task(faults.Task):
    """It can be killed within a step."""

    unsaved_attributes = ("steps_left",)
    steps_left = -1

    def train_step(self, batch: Any) -> Any:
        Task.steps_left -= 1
        if Task.steps_left == 0:
            raise Killed
        return super().train_step(batch)


def stable(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1000)


def cooldown(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)


def build(folder: Path, scheduler: Any = stable, add_ons: Any = (EMAAddon,), lr: float = 0.01, **options: Any) -> Any:
    model = faults.classifier()
    options = {"log_bar": False, "seed": 5, "scheduler_step_on_batch": True, "log_every": 1, **options}
    if EMAAddon in add_ons:
        options.setdefault("decay", 0.5)
    return Task.add_on(StateManagerAddon, *add_ons)(
        model, "cpu", optimizer=lambda p: torch.optim.AdamW(p, lr=lr), scheduler=scheduler, save_path=folder,
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two epochs and two steps: its last checkpoint is in the middle of an epoch."""
    trainer = build(tmp_path_factory.mktemp("source") / "stable", save_every=1, keep_last=3)
    trainer.run(3, hand.loader(), max_steps=14)
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    return [value.clone() for value in trainer.unwrap().state_dict().values()]


def rates(trainer: Any) -> list[float]:
    return [record["lr"] for record in trainer.log_history if "lr" in record]


@pytest.mark.parametrize("parts", [("model",), WSD])
def test_it_is_what_one_does_by_hand(source: Any, parts: tuple[str, ...], tmp_path: Path) -> None:
    """The weights, and the moments where they are asked for; every setting and the schedule are the script's."""
    model = faults.classifier()
    model.load_state_dict(source.unwrap().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if "optimizer" in parts:
        state = source.optimizer.state_dict()
        optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
    by_hand = Task.add_on(StateManagerAddon)(
        model, "cpu", optimizer=optimizer, scheduler=cooldown(optimizer), seed=5, scheduler_step_on_batch=True,
        log_bar=False, log_every=1, save_path=tmp_path / "hand",
    )  # fmt: skip
    by_hand.run(2, hand.loader())
    trainer = build(tmp_path / "new", cooldown, (), 0.02, resume="auto", start_from=source.save_path, start_with=parts)
    trainer.run(2, hand.loader())
    assert rank_tasks.same(weights(trainer), weights(by_hand))
    assert rates(trainer) == rates(by_hand)
    assert rates(trainer)[0] == pytest.approx(0.02 * 11 / 12)
    assert rates(trainer)[-1] == 0
    progress, before = trainer.progress_checker, source.progress_checker
    assert (before.epoch, before.step) == (2, 14)
    assert (progress.epoch, progress.step) == ((5, 26) if "progress" in parts else (2, 12))


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    "options",
    [
        {"start_with": WSD},
        {"add_ons": (EMAAddon, EarlyStoppingAddon), "patience": 9, "start_with": ("model", "EMAAddon", "random")},
        {"scheduler": stable, "start_with": ("scheduler", "optimizer", "progress", "model"), "seed": None},
        {"make": lambda: iter([batch for _ in range(4) for batch in hand.loader(shuffle=False)]), "start_with": WSD},
    ],
    ids=["cooldown", "average", "schedule", "iterator"],
)
def test_killed_at_every_step_it_ends_the_same(source: Any, options: Any, tmp_path: Path) -> None:
    """Before the first checkpoint the parts are read again; after it they need not be there."""
    make: Callable[[], Any] = options.get("make", hand.loader)
    options = {key: value for key, value in options.items() if key != "make"}
    copied = tmp_path / "source"

    def play(folder: Path, at: int, seed: int) -> dict[str, str]:
        faults.ambient(seed if options.get("seed", 5) else 1)
        Task.steps_left = at
        trainer = build(
            folder, **{"scheduler": cooldown, **options}, save_every=2, resume="auto", start_from=copied,
        )  # fmt: skip
        data = make()
        length = None if make is hand.loader else 6
        trainer.run(1, data, steps_per_epoch=length)
        trainer.run(1, data, steps_per_epoch=length)
        return faults.everything(trainer)

    def put() -> None:
        if not copied.exists():
            shutil.copytree(source.last_path, copied)

    put()
    whole = play(tmp_path / "whole", 0, 1)
    for at in range(1, 13, 2 if options["start_with"] == WSD else 3):
        put()
        folder = tmp_path / str(at)
        with pytest.raises(Killed):
            play(folder, at, 2)
        if at > 2:
            shutil.rmtree(copied)
        assert play(folder, 0, 3) == whole, at


def test_checkpoints_say_what_their_run_started_from(
    source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run says it too; the report of doctor names the run and the step."""
    build(tmp_path / "new", start_from=source.save_path).run(1, hand.loader())
    resumed = build(tmp_path / "new", resume=True)
    resumed.run(2, hand.loader())
    saved = [read_manifest(path)["info"]["parent"] for path in list_checkpoints(tmp_path / "new")]
    origin = read_manifest(source.last_path)
    wanted = {name: origin[name] for name in ("run_id", "step", "sha256")}  # type: ignore[literal-required]
    assert saved
    assert all(each == {"path": str(source.last_path), "parts": ["model"], **wanted} for each in saved)
    assert resumed.checkpoints.lineage.run_id != origin["run_id"]
    assert main(["doctor", str(tmp_path / "new")]) == 0
    assert (
        f"started from {source.last_path}, step {origin['step']} of run {origin['run_id']}" in capsys.readouterr().out
    )
    assert "parent" not in origin["info"]


def test_a_schedule_brings_its_rates(source: Any, tmp_path: Path) -> None:
    """With the scheduler comes the rate that it has reached, and its length; of the counters nothing."""
    first = build(tmp_path / "first", cooldown, ())
    first.run(1, hand.loader())
    second = build(tmp_path / "b", cooldown, (), start_from=first.last_path, start_with=("model", "scheduler"))
    second.run(1, hand.loader())
    assert rates(first) + rates(second) == pytest.approx([0.01 * (11 - i) / 12 for i in range(12)])
    assert second.progress_checker.step == 6


def test_the_average_begins_at_the_weights_that_were_taken(source: Any, tmp_path: Path) -> None:
    """Not at those that the model was made with; or it is the saved one, where it is asked for."""
    for parts, expected in ((("model",), source.model_state()), (("model", "EMAAddon"), source.average)):
        trainer = build(tmp_path / str(len(parts)), start_from=source.save_path, start_with=parts)
        trainer.setup()
        assert all(torch.equal(trainer.average[key], value) for key, value in expected.items())
        assert trainer.progress_checker.step == 0


def test_what_an_optimizer_counts_in_its_groups_comes_with_its_state(tmp_path: Path) -> None:
    """A schedule-free optimizer counts steps and weights there: moments without them would be of another average."""

    def make(folder: str, **options: Any) -> Any:
        model = faults.classifier()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
        options = {"save_path": tmp_path / folder, "resume": "auto", "log_bar": False, "seed": 5, **options}
        return faults.Task.add_on(StateManagerAddon)(model, "cpu", optimizer=optimizer, **options)

    batches = list(hand.loader())
    straight = make("straight")
    straight.run(2, batches)
    make("first").run(1, batches)
    second = make("second", start_from=tmp_path / "first", start_with=("model", "optimizer", "random"))
    second.run(1, batches)
    assert hand.digest(second.model) == hand.digest(straight.model)
    assert second.optimizer.param_groups[0]["k"] == straight.optimizer.param_groups[0]["k"] > 0


def test_the_random_streams_come_where_they_are_asked_for(source: Any, tmp_path: Path) -> None:
    """What the checkpoint would have drawn next, whatever the seed."""
    trainer = build(tmp_path, seed=9, start_from=source.save_path, start_with=("random",))
    trainer.setup()
    drawn = torch.rand(3)
    saved = load_state(source.last_path)["position"]["present"]["random"]["torch"]
    torch.set_rng_state(saved)
    assert torch.equal(torch.rand(3), drawn)


def test_f_a_only_what_is_needed_is_read(source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file that is needed is refused, another is not looked at; of a folder the newest whole one."""
    damaged = tmp_path / "damaged"
    shutil.copytree(source.last_path, damaged)
    (damaged / "state.json").write_text("{}")
    trainer = build(tmp_path / "a", start_from=damaged)
    trainer.setup()
    assert rank_tasks.same(weights(trainer), weights(source))
    with pytest.raises(CheckpointDamaged, match=r"state\.json"):
        build(tmp_path / "b", start_from=damaged, start_with=("model", "optimizer")).setup()
    (damaged / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        build(tmp_path / "c", start_from=damaged).setup()
    folder = tmp_path / "folder"
    shutil.copytree(source.save_path, folder)
    (folder / source.last_path.name / "state.json").write_text("{}")
    build(tmp_path / "d", start_from=folder).setup()
    assert "which is damaged" in caplog.text
    assert "; taking " in caplog.text


class Wide(Trainer):
    """Of another network."""

    train_step = test_step = faults.Task.train_step


def test_parts_that_do_not_fit_change_nothing(source: Any, tmp_path: Path) -> None:
    """Other weights, other groups, no schedule to take."""
    wide = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 2))
    made = Wide.add_on(StateManagerAddon)(
        wide, "cpu", optimizer=torch.optim.AdamW(wide.parameters()), save_path=tmp_path / "a", log_bar=False,
        start_from=source.save_path,
    )  # fmt: skip
    before = faults.fingerprint(wide.state_dict())
    with pytest.raises(CheckpointMismatch, match="do not fit"):
        made.setup()
    assert faults.fingerprint(wide.state_dict()) == before
    bare = build(tmp_path / "b", None, (), start_from=source.save_path, start_with=("model", "scheduler"))
    with pytest.raises(CheckpointMismatch, match=r"with the schedulers \['0'\], and this trainer has \[\]"):
        bare.setup()
    other = build(tmp_path / "c", cooldown, (), start_from=source.save_path, start_with=("model", "scheduler"))
    with pytest.raises(CheckpointMismatch, match="was saved by ConstantLR, and is LinearLR here"):
        other.setup()
    plain = build(tmp_path / "d", None, ())
    plain.run(1, hand.loader())
    lacks = build(tmp_path / "e", None, start_from=plain.save_path, start_with=("model", "EMAAddon"))
    with pytest.raises(CheckpointMismatch, match="has no entry of EMAAddon"):
        lacks.setup()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start_with": ("modle",)}, ConfigError, "did you mean 'model'"),
        ({"start_with": ("EMAaddon",)}, ConfigError, "did you mean 'EMAAddon'"),
        ({"start_with": ("StateManagerAddon",)}, ConfigError, "is not a part"),
        ({"start_with": "model"}, ConfigError, r"start_with=\('model', 'optimizer'\)"),
        ({"start_with": ()}, ConfigError, "a tuple of parts"),
        ({"start_from": None, "start_with": ("model",)}, ConfigError, "give its path: start_from="),
        ({"start_from": 3}, ConfigError, "must be the path of a checkpoint"),
        (
            {"start_from": "no-such-run"},
            CheckpointNotFound,
            "does not exist; give the folder of a checkpoint, or a file",
        ),
        ({"start_from": "."}, CheckpointDamaged, "manifest.json"),
        ({"resume": True}, ConfigError, "begins a new run, and resume=True continues one"),
        ({"resume": "elsewhere"}, ConfigError, "begins a new run, and resume='elsewhere' continues one"),
        ({"allow_partial": ["state.json"]}, ConfigError, "start_with selects the files"),
    ],
)
def test_options_that_cannot_be_meant(
    source: Any, options: Any, error: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it before anything begins."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        build(tmp_path / "new", **{"start_from": source.save_path, **options})


def test_a_checkpoint_of_the_folder_itself_is_refused(source: Any) -> None:
    """With resume='auto' that run would be continued, and nothing would be taken."""
    for path in (source.save_path, source.last_path):
        with pytest.raises(ConfigError, match="is in save_path"):
            build(source.save_path, start_from=path, resume="auto")


def test_several_ranks_start_alike(tmp_path: Path) -> None:
    """Each rank takes the same weights and moments, and its own random streams; killed and restarted, too."""

    def make(name: str, **options: Any) -> Any:
        return rank_tasks.build(
            Failing, (MultiGPUAddon, StateManagerAddon), ["cpu", "cpu"], rank_tasks.network(dropout=0.5), seed=1,
            save_path=tmp_path / name, save_every=1, **options,
        )  # fmt: skip

    def play(name: str, fail_at: int = -1) -> Any:
        Failing.fail_at = fail_at
        parts = (*WSD, "random")
        trainer = make(name, resume="auto", start_from=tmp_path / "first", start_with=parts)
        trainer.run(1, rank_tasks.loader(16, 2, 3))
        return rank_tasks.weights(trainer), trainer.progress_checker.state_dict()

    with rank_tasks.forks():
        make("first").run(1, rank_tasks.loader(16, 2, 3))
        whole = play("whole")
        with pytest.raises(RuntimeError, match="as it was told"):
            play("killed", 6)
        again = play("killed")
    assert rank_tasks.same(whole[0], again[0])
    assert whole[1] == again[1]
    assert whole[1]["step"] == 8


class Failing(rank_tasks.Task):
    """It fails where it is told to."""

    fail_at = -1

    def train_step(self, batch: Any) -> Any:
        if self.progress_checker.step == self.fail_at:
            raise RuntimeError("failed as it was told to")
        return super().train_step(batch)


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "start_from": lambda folder, own: build(own, start_from=folder),
    "resume": lambda folder, own: build(own, resume=folder).run(1, hand.loader()),
    "load_state": lambda folder, own: build(own).load_state(folder),
    "apply_weights": lambda folder, own: build(own).apply_weights(folder),
}


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["model.safetensors", "best.ckpt", "weights-00000012.safetensors", "last.pt"])
def test_a_folder_of_weights_alone_is_named_with_the_calls_that_take_its_file(
    call: str, name: str, source: Any, tmp_path: Path
) -> None:
    """As Transformers writes it, or as what was left of a checkpoint: it is no damaged one."""
    folder = tmp_path / "saved"
    folder.mkdir()
    file = source.save_model(folder / name)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFound, match=r"a folder without a checkpoint; .*only from a checkpoint") as raised:
        CALLS[call](folder, tmp_path / "run")
    assert f"the file of weights in it: {str(file)!r}, to start_from or apply_weights" in str(raised.value)
    build(tmp_path / "other", start_from=file).run(1, hand.loader())
    if call in ("resume", "load_state"):
        with pytest.raises(ConfigError, match=r"is a file, not a directory; .*start_from and apply_weights take"):
            CALLS[call](file, tmp_path / "run")


def test_a_checkpoint_that_has_lost_files_is_damaged(source: Any, tmp_path: Path) -> None:
    saved = list_checkpoints(source.save_path)[0]
    for lost in (["manifest.json"], ["manifest.json", "state.json"]):
        folder = tmp_path / f"without{len(lost)}"
        shutil.copytree(saved, folder)
        for name in lost:
            (folder / name).unlink()
        for call in ("start_from", "resume", "load_state"):
            with pytest.raises(CheckpointDamaged, match=r"manifest.json: is missing"):
                CALLS[call](folder, tmp_path / "run")
