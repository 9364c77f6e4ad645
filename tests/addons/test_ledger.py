"""The ledger of a run, and `python -m zae diff`, which names where two runs differ."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import ConfigError, Every, Trainer
from zae.addons import AMPAddon, GradientAccumulationAddon, LedgerAddon, StateManagerAddon
from zae.addons.ledger.step_record import random_state
from zae.cli import main
from zae.diff import STAGES, compare, read_ledger
from zae.values.hashes import fingerprint


def flip(tensor: Any) -> None:
    """Flip a bit of the first element."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[0] ^= 1 << 20


class Task(Trainer):
    """A task that notes what it trained on, and goes astray on demand."""

    astray: tuple[str, int] = ("", 0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.samples = [*getattr(self, "samples", []), batch[1].flatten().long().tolist()]
        loss = self.model(batch[0]).square().mean()
        if self._now("forward"):
            torch.rand(1)
        return {"loss": loss * (1 + 1e-7) if self._now("loss") else loss}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[0]).square().mean()}

    def _now(self, place: str) -> bool:
        return self.astray == (place, self.progress_checker.step + 1)

    def on_step_begin(self, batch: Any) -> None:
        super().on_step_begin(batch)
        if self._now("between"):
            flip(self.model[2].weight)

    def normalize(self, num_targets: Any) -> None:
        super().normalize(num_targets)
        if self._now("backward"):
            self.parameters[0].grad[0, 0].mul_(1 + 1e-6)

    def clip(self) -> None:
        super().clip()
        if self._now("clip"):
            self.parameters[0].grad[0, 0].mul_(1 + 1e-6)

    def step_one(self, optimizer: Any) -> bool:
        group = optimizer.param_groups[0]
        kept = {**group}
        if self._now("rate"):
            group["lr"] *= 2
        if self._now("decay"):
            group["weight_decay"] = 0.1
        stepped = super().step_one(optimizer)
        group.update(lr=kept["lr"], weight_decay=kept["weight_decay"])
        return stepped

    def optimizer_step(self) -> bool:
        stepped = super().optimizer_step()
        if self._now("step"):
            with torch.no_grad():
                self.parameters[0].view(torch.int32)[0, 0] += 1  # The last bit of one weight.
        if self._now("state"):
            flip(self.optimizer.state[self.model[2].bias]["exp_avg_sq"])
        return stepped


def loader_of(workers: int = 0, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10.0)[:, None])
    return DataLoader(data, batch_size=3, shuffle=True, num_workers=workers, **options)


def train(path: Path, *add_ons: Any, astray: tuple[str, int] = ("", 0), loader: Any = None, n_epoch: int = 3,
          seed: int = 1, max_steps: int | None = None, **options: Any) -> Any:  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.manual_seed(seed)
    cls = Task.add_on(LedgerAddon, *add_ons)
    trainer = cls(model, "cpu", optimizer=optimizer, scheduler=scheduler, ledger_path=path, seed=seed, **options)
    trainer.astray = astray
    trainer.run(n_epoch, loader if loader is not None else loader_of(), max_steps=max_steps)
    return trainer


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ledger_has_a_line_for_each_step_with_all_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    trainer = train(path, gradient_clip=0.001)
    header, *entries = lines(path)
    assert header == {"ledger": 1, "begins_after": 0, "composition": ["LedgerAddon"]}
    assert [entry["step"] for entry in entries] == list(range(1, 13))
    assert [entry["epoch"] for entry in entries] == [1] * 4 + [2] * 4 + [3] * 4
    for entry, samples in zip(entries, trainer.samples, strict=True):
        stages = entry["stages"]
        assert tuple(stages) == STAGES
        assert stages["batch"]["data"] == [samples]
        assert len({stages[stage]["random"] for stage in ("backward", "clip", "step")}) == 1
        assert stages["forward"]["random"] == [stages["backward"]["random"]]
        assert stages["batch"]["random"] != stages["backward"]["random"]  # Of the dropout.
        assert stages["backward"]["gradients"] != stages["clip"]["gradients"]
        assert stages["step"]["stepped"] is True
    assert [entry["stages"]["step"]["lr"]["lr"] for entry in entries[::4]] == pytest.approx([0.01, 0.01, 0.001])
    assert entries[-1]["stages"]["step"]["weights"] == fingerprint(trainer.unwrap().state_dict().values())
    losses = [entry["stages"]["forward"]["loss"][0] for entry in entries[:4]]
    assert (
        sum(n * loss for n, loss in zip((3, 3, 3, 1), losses, strict=True)) / 10
        == trainer.train_history[0]["train_loss"]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_ledger_notes_the_samples_of_a_prefetching_loader(workers: int, tmp_path: Path) -> None:
    options = {"persistent_workers": True} if workers else {}
    trainer = train(tmp_path / "a", loader=loader_of(workers, **options), n_epoch=2)
    noted = [entry["stages"]["batch"]["data"][0] for entry in lines(tmp_path / "a")[1:]]
    assert noted == trainer.samples


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_ledger_of_a_window_has_all_its_batches(tmp_path: Path) -> None:
    add_ons = (GradientAccumulationAddon, AMPAddon)
    options = {"gradient_accumulation_steps": 3, "precision": "fp16", "loss_scale": (2.0**40, 1.0)}
    trainer = train(tmp_path / "a", *add_ons, n_epoch=2, **options)
    entries = lines(tmp_path / "a")[1:]
    assert [len(entry["stages"]["batch"]["data"]) for entry in entries] == [3, 1, 3, 1]
    assert [s for entry in entries for s in entry["stages"]["batch"]["data"]] == trainer.samples
    assert [len(entry["stages"]["forward"]["loss"]) for entry in entries] == [3, 1, 3, 1]
    assert [entry["stages"]["step"]["stepped"] for entry in entries] == [False] * 4
    assert len({entry["stages"]["step"]["weights"] for entry in entries}) == 1


def test_ledger_every_so_many_steps(tmp_path: Path) -> None:
    train(tmp_path / "a", ledger_every=5)
    assert [entry["step"] for entry in lines(tmp_path / "a")[1:]] == [5, 10]


@pytest.mark.parametrize("workers", [0, 2])
def test_ledger_notes_the_samples_of_the_steps_it_writes(workers: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "ledger_every": 3}
    trainer = train(tmp_path / "a", GradientAccumulationAddon, n_epoch=4, loader=loader_of(workers), **options)
    entries = lines(tmp_path / "a")[1:]
    assert [entry["step"] for entry in entries] == [3, 6]  # Four batches, two steps an epoch: the 2nd and the 3rd.
    assert [entry["stages"]["batch"]["data"] for entry in entries] == [trainer.samples[4:6], trainer.samples[10:12]]


def test_ledger_leaves_the_loader_of_an_epoch_alone_that_it_writes_nothing_of(tmp_path: Path) -> None:
    loader, seen = loader_of(), []

    class Seeing(Task):
        def batches(self, wrapped: Any) -> Any:
            seen.append(wrapped is loader)
            return super().batches(wrapped)

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Seeing.add_on(LedgerAddon)(model, "cpu", optimizer=optimizer, ledger_path=tmp_path / "a", ledger_every=6)
    trainer.run(1, loader, max_steps=1)
    trainer.run(3, loader)
    assert seen == [True, True, False, False]  # Steps 1; 2 to 4; 5 to 8; 9 to 12.


def test_ledger_hashes_what_has_no_sampler(tmp_path: Path) -> None:
    batches = [(torch.ones(2, 3) * k, torch.zeros(2, 1)) for k in (1, 2, 1)]
    train(tmp_path / "a", loader=batches, n_epoch=1)
    first, second, third = (entry["stages"]["batch"]["data"] for entry in lines(tmp_path / "a")[1:])
    assert first == third != second


def test_ledger_refuses_what_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a ledger counts in steps: write ledger_every=10"):
        train(tmp_path / "a", ledger_every=Every(epochs=1))
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path, r"is a folder; give a file in it: .*ledger\.jsonl"),
        (tmp_path / "file" / "ledger.jsonl", "is a file, not a folder"),
        (None, "ledger_path=None; it must be the path of a file"),
        (3, "ledger_path=3; it must be the path of a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(path)


def test_a_ledger_that_cannot_be_created_names_the_option(tmp_path: Path) -> None:
    """Its folder was free when the trainer was made, and is a file when the run begins."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Task.add_on(LedgerAddon)(model, "cpu", optimizer=optimizer, ledger_path=tmp_path / "run" / "ledger.jsonl")
    (tmp_path / "run").touch()
    with pytest.raises(
        ConfigError, match=r"ledger_path='.*ledger.jsonl' cannot be created: File exists .*; give a file in"
    ):
        trainer.run(1, loader_of())


def test_ledger_path_is_settled_when_the_trainer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all other paths: wherever the script goes in the meantime, and of the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for path in ("run/ledger.jsonl", "~/ledger.jsonl"):
        trainer = Task.add_on(LedgerAddon)(model, "cpu", optimizer=optimizer, ledger_path=path)
        monkeypatch.chdir(tmp_path / "elsewhere")
        trainer.run(1, loader_of())
        monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "run/ledger.jsonl", tmp_path / "home/ledger.jsonl"):
        assert [entry["step"] for entry in lines(path)[1:]] == [1, 2, 3, 4]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_ledgers_without_a_common_step_are_told_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", n_epoch=1, ledger_every=3)
    train(tmp_path / "b", n_epoch=1, ledger_every=4)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "(1 and 1 steps); write them with the same ledger_every=" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- the diff


@pytest.mark.parametrize(
    ("place", "stage", "what"),
    [
        ("forward", "forward", "random"),
        ("loss", "forward", "loss"),
        ("backward", "backward", "gradients"),
        ("clip", "clip", "gradients"),
        ("rate", "step", "lr"),
        ("decay", "step", "settings"),
        ("step", "step", "weights"),
    ],
)
def test_ledger_diff_names_the_step_and_the_stage(place: str, stage: str, what: str, tmp_path: Path) -> None:
    """Two runs that part at step 7, each time at another stage."""
    train(tmp_path / "a")
    train(tmp_path / "b", astray=(place, 7))
    found = compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b"))
    assert found is not None
    assert (found.step, found.stage, found.what) == (7, stage, what)


@pytest.mark.sample(count=3)
@pytest.mark.parametrize(
    ("place", "stage", "names"),
    [
        ("between", "batch", ["weight:2.weight"]),
        ("backward", "backward", ["gradient:0.weight"]),
        ("clip", "clip", ["gradient:0.weight"]),
        ("step", "step", ["weight:0.weight"]),
        ("state", "step", ["exp_avg_sq:2.bias"]),
        ("loss", "backward", ["gradient:2.bias", "gradient:2.weight", "gradient:0.bias", "gradient:0.weight"]),
    ],
)
def test_a_deep_diff_names_the_first_tensor(
    place: str, stage: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of one element is flipped at step 7, each time of another tensor."""
    train(tmp_path / "a", ledger_tensors=True)
    plain = train(tmp_path / "plain")
    train(tmp_path / "b", astray=(place, 7), ledger_tensors=True)
    assert fingerprint(train(tmp_path / "a2", ledger_tensors=True).unwrap().parameters()) == fingerprint(
        plain.unwrap().parameters()
    )
    assert main(["diff", "--deep", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], [f"{each['kind']}:{each['name']}" for each in found["tensors"]]) == (7, names)
    assert {each["stage"] for each in found["tensors"]} == {stage}
    assert main(["diff", "--deep", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    kind, _, name = names[0].partition(":")
    shown = {"weight": f"weight {name}", "gradient": f"gradient of {name}"}.get(kind, f"{kind} of {name}")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("  the first tensor that differs, ")
    assert said.endswith(f": {shown}") or f": {shown}; {len(names)} differ there: " in said
    assert main(["diff", "--deep", str(tmp_path / "a"), str(tmp_path / "a2")]) == 0
    assert main(["diff", "--deep", str(tmp_path / "a"), str(tmp_path / "plain")]) == 2
    wanted = "plain has no hashes of single tensors; write the ledgers with ledger_tensors=True"
    assert wanted in capsys.readouterr().err


def test_a_deep_diff_names_a_tensor_of_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader, other = loader_of(), loader_of()
    other.dataset.tensors[1][:] *= 2
    train(tmp_path / "a", loader=loader, ledger_tensors=True)
    train(tmp_path / "b", loader=other, ledger_tensors=True)
    assert main(["diff", "--deep", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "the first tensor that differs, before the step: tensor 0.1 of the batch" in capsys.readouterr().out


def test_ledger_diff_names_other_data_first(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", seed=2)
    found = compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b"))
    assert found is not None
    assert (found.step, found.stage, found.what) == (1, "batch", "data")


def test_ledger_diff_names_a_changed_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The samples are the same: what differs is found in the batch, not first in the loss."""
    train(tmp_path / "a")
    loader = loader_of()
    loader.dataset.tensors[1][4] += 1
    train(tmp_path / "b", loader=loader)
    found = compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b"))
    assert found is not None
    assert (found.stage, found.what) == ("batch", "content")
    (inputs, labels), (others, changed) = found.first[0], found.second[0]
    assert (inputs == others, labels == changed) == (True, False)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "in the stage 'batch': the content of the batch differs (a value or a label" in capsys.readouterr().out


def test_a_ledger_without_the_newer_entries_is_compared_by_the_others(tmp_path: Path) -> None:
    """One of an earlier zae lacks the content of batches and the settings; a stage that is missing is a difference."""
    train(tmp_path / "a")
    new, old = read_ledger(tmp_path / "a"), read_ledger(tmp_path / "a")
    for entry in old.values():
        del entry["stages"]["batch"]["content"], entry["stages"]["step"]["settings"]
    assert compare(new, old) is None
    old[5]["stages"]["step"]["weights"] = "0"
    assert compare(old, new)[:3] == (5, "step", "weights")  # type: ignore[index]
    del old[4]["stages"]["clip"]
    assert compare(new, old)[:2] == (4, "clip")  # type: ignore[index]


def test_ledger_notes_the_settings_of_each_of_several_optimizers(tmp_path: Path) -> None:
    """Of the second, whose rate is another only while it steps, as of the first."""

    class Two(Task):
        def step_one(self, optimizer: Any) -> bool:
            kept = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = kept * 3
            stepped = super().step_one(optimizer)
            optimizer.param_groups[0]["lr"] = kept
            return stepped

        def train_step(self, batch: Any) -> dict[str, Any]:
            loss = self.model(batch[0]).square().mean()
            return {"loss": {"a": loss, "b": loss * 2}}

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizers = {
        "a": torch.optim.SGD(model[0].parameters(), lr=1.0),
        "b": torch.optim.SGD(model[1].parameters(), lr=2.0),
    }
    trainer = Two.add_on(LedgerAddon)(model, "cpu", optimizer=optimizers, ledger_path=tmp_path / "a")
    trainer.run(1, loader_of())
    stages = [entry["stages"]["step"] for entry in lines(tmp_path / "a")[1:]]
    assert all(stage["lr"] == {"lr/a": 3.0, "lr/b": 6.0} for stage in stages)
    assert list(stages[0]["settings"]) == ["a", "b"]
    assert not any(o._optimizer_step_pre_hooks for o in optimizers.values())


def test_ledger_hashes_a_batch_of_arrays(tmp_path: Path) -> None:
    class OfArrays(Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step([torch.from_numpy(each) for each in batch])

    noted = []
    for changed in (0.0, 1.0):
        model = nn.Linear(3, 1)
        trainer = OfArrays.add_on(LedgerAddon)(
            model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), ledger_path=tmp_path / "a"
        )
        trainer.run(1, [(np.ones((2, 3), np.float32), np.full((2, 1), changed, np.float32))])
        noted.append(read_ledger(tmp_path / "a")[1]["stages"]["batch"]["content"][0])
    assert noted[0][0] == noted[1][0]
    assert noted[0][1] != noted[1][1]


def test_ledger_diff_finds_two_equal_runs_the_same(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    assert compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b")) is None
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def test_ledger_of_a_resumed_run_is_that_of_a_whole_one(tmp_path: Path) -> None:
    """What was trained twice is there once; what a kill cut off does not matter."""
    options: dict[str, Any] = {"resume": "auto", "save_every": 3, "keep_last": None}
    train(tmp_path / "a", StateManagerAddon, save_path=tmp_path / "whole", **options)
    train(tmp_path / "b", StateManagerAddon, save_path=tmp_path / "cut", max_steps=8, **options)
    last = tmp_path / "cut" / "step-00000008"
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    with (tmp_path / "b").open("a") as file:
        file.write('{"step": 9, "stages": {"ba')
    resumed = train(tmp_path / "b", StateManagerAddon, save_path=tmp_path / "cut", **options)
    assert resumed.progress_checker.step == 12
    headers = [json.loads(line) for line in (tmp_path / "b").read_text().splitlines() if "ledger" in line]
    assert [header["begins_after"] for header in headers] == [0, 6]
    assert compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b")) is None
    assert read_ledger(tmp_path / "a").keys() == read_ledger(tmp_path / "b").keys()


def test_ledger_of_a_new_run_in_an_old_file_is_read_alone(tmp_path: Path) -> None:
    train(tmp_path / "a", seed=2, n_epoch=4)
    train(tmp_path / "a")
    train(tmp_path / "b")
    assert read_ledger(tmp_path / "a") == read_ledger(tmp_path / "b")


def test_ledger_that_a_kill_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    train(tmp_path / "a")
    text = (tmp_path / "a").read_text()
    (tmp_path / "a").write_text(text[: len(text) - 40])
    assert list(read_ledger(tmp_path / "a")) == list(range(1, 12))
    (tmp_path / "a").write_text("no ledger\n" + text)
    with pytest.raises(ConfigError, match="line 1 is not a line of a ledger: no ledger"):
        read_ledger(tmp_path / "a")


def test_a_ledger_that_the_disk_refuses_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the file, and the weights are those of a run without it."""
    (tmp_path / "full").symlink_to("/dev/full")
    watched = train(tmp_path / "full", n_epoch=1)
    assert [record.getMessage().partition(". Training")[0] for record in caplog.records] == [
        f"the ledger {tmp_path / 'full'} cannot be written: No space left on device"
    ]
    plain = train(tmp_path / "a", n_epoch=1)
    assert fingerprint(watched.unwrap().parameters()) == fingerprint(plain.unwrap().parameters())


def test_ledger_diff_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0 for the same, 1 for a difference, 2 for wrong usage; a run is a file or a folder."""
    a, b, c = (tmp_path / name / "ledger.jsonl" for name in "abc")
    train(a)
    train(b)
    train(c, astray=("clip", 7))
    assert main(["diff", str(a), str(b.parent)]) == 0
    assert "the same in all 12 common steps" in capsys.readouterr().out
    assert main(["diff", str(a.parent), str(c.parent)]) == 1
    told = capsys.readouterr().out
    assert "the runs differ at step 7, in the stage 'clip'" in told
    assert "the same up to step 6" in told
    assert main(["diff", "--json", str(a), str(c)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["step"], found["stage"], found["what"]) == (False, 7, "clip", "gradients")
    assert main(["diff", str(a), str(tmp_path / "missing")]) == 2
    assert "contains no ledger (No such file or directory)" in capsys.readouterr().err
    (tmp_path / "weights").write_bytes(b"\xff\xfe\n{}\n")
    assert main(["diff", str(a), str(tmp_path / "weights")]) == 2  # Not 1: nothing was compared.
    assert "weights, line 1 is not a line of a ledger" in capsys.readouterr().err
    train(b, n_epoch=2)
    assert main(["diff", str(a), str(b)]) == 1
    assert "runA ends at step 12, runB at step 8" in capsys.readouterr().out


def test_ledger_diff_is_a_command_that_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from zae.cli import main; main(sys.argv[1:]) ; assert 'torch' not in sys.modules"
    train(tmp_path / "a", n_epoch=1)
    for arguments in (["diff", str(tmp_path / "a"), str(tmp_path / "a")], []):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=600)
    shown = subprocess.run([sys.executable, "-X", "importtime", "-m", "zae", "--help"], capture_output=True, text=True,
                           check=True, timeout=600)  # fmt: skip
    assert "diff" in shown.stdout
    assert "| torch" not in shown.stderr


# ------------------------------------------------------------------------------------------------ the fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 1000, 300_001])
def test_ledger_fingerprint_sees_every_change(dtype: torch.dtype, size: int) -> None:
    """One element changed, two exchanged, another shape or dtype."""
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 2, (size,), generator=generator).to(dtype)
    same = fingerprint([tensor])
    assert fingerprint([tensor.clone()]) == same
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        other[place] = 1 - int(other[place])
        assert fingerprint([other]) != same
    assert fingerprint([tensor[None]]) != same
    if size > 1:
        order = torch.arange(size)
        first, second = int((tensor == 0).nonzero()[0]), int((tensor != 0).nonzero()[-1])
        order[first], order[second] = second, first
        assert fingerprint([tensor[order]]) != same
        assert fingerprint([tensor[:1], tensor[1:]]) != same


def test_ledger_fingerprint_reads_views_as_what_they_show() -> None:
    table = torch.arange(12.0).view(3, 4)
    assert fingerprint([table.T]) == fingerprint([table.T.contiguous()])
    assert fingerprint([table.flatten()[1:8]]) == fingerprint([table.flatten()[1:8].clone()])
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])
    assert fingerprint([]) == fingerprint([])


def rows(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(each) for each in values]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.nested_tensor(rows([1.0, x], [3.0]), layout=torch.jagged),
        lambda x: torch.nested.nested_tensor(rows([1.0, x], [3.0]), layout=torch.strided),
        lambda x: torch.tensor([[0.0, x], [1.0, 0.0]]).to_sparse(),
        lambda x: torch.tensor([[0.0, x], [1.0, 0.0]]).to_sparse_csr(),
    ],
)
def test_ledger_fingerprint_of_tensors_that_are_not_dense(make: Any) -> None:
    """A batch may be nested, the gradients of an embedding are sparse: what is in them counts as well."""
    assert fingerprint([make(2.0)]) == fingerprint([make(2.0)])
    assert fingerprint([make(2.0)]) != fingerprint([make(4.0)])


def test_a_ledger_of_nested_batches_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    batch = torch.nested.nested_tensor(rows([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]), layout=torch.jagged)

    class Nested(Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch).values().square().mean()}

    weights = []
    for cls, options in ((Nested, {}), (Nested.add_on(LedgerAddon), {"ledger_path": tmp_path / "ledger.jsonl"})):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options).run(2, [batch])
        weights.append(model.weight)
    assert torch.equal(*weights)
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 2


@pytest.mark.exhaustive
def test_ledger_hashes_are_the_same_in_every_process() -> None:
    code = (
        "import torch, random, numpy; from zae.addons.ledger.step_record import random_state; "
        "from zae.values.hashes import fingerprint\n"
        "torch.manual_seed(0); random.seed(0); numpy.random.seed(0)\n"
        "print(fingerprint([torch.ones(3), torch.zeros(200000)]), random_state())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert other == here.getvalue()
    before = random_state()
    assert random_state() == before
    torch.rand(1)
    assert random_state() != before
