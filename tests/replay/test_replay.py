"""`python -m zae replay`: a step of a run is computed again, bitwise, and shown; nothing is written into the run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kit.blocks import find_page, shape
from zae.cli import main
from zae.diff import read_ledger
from zae.errors import NonFiniteError

SCRIPT = '''
import os
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from zae import Trainer
from zae.addons import JSONLLoggerAddon, LedgerAddon, MultiGPUAddon, StateManagerAddon


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class Task(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": mse_loss(self.model(x), y)}

    test_step = train_step


def make_trainer(bad=37, **options):
    torch.manual_seed(0)
    x = torch.rand(64, 3) + 0.1
    if bad is not None:
        x[bad] = -1.0  # A row that was measured wrongly.
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(Log(), nn.Linear(3, 8), nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = {"seed": 1, "log_bar": False, "save_path": "run", "save_every": 4, "keep_last": None,
             "ledger_path": "run/ledger.jsonl", "jsonl_path": "run/log.jsonl"}
    task = Task.add_on(StateManagerAddon, LedgerAddon, JSONLLoggerAddon)
    return task(model, "cpu", optimizer=optimizer, **{**given, **options}), {"n_epoch": 2, "loader": loader}


def make_good():
    return make_trainer(None)


class Logging(Task.add_on(JSONLLoggerAddon, StateManagerAddon)):
    """A task that has add-ons in itself."""


def make_derived():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.rand(16, 3), torch.rand(16, 1)), batch_size=4, shuffle=True)
    trainer = Logging.add_on(LedgerAddon)(model, "cpu", optimizer=optimizer, seed=1, log_bar=False, save_path="derived",
                                          ledger_path="derived/ledger.jsonl", jsonl_path="derived/log.jsonl")
    return trainer, {"n_epoch": 2, "loader": loader}


CASES = {
    "amp": (["AMPAddon"], {"precision": "bf16"}),
    "fp16": (["AMPAddon"], {"precision": "fp16"}),
    "accumulation": (["GradientAccumulationAddon"], {"gradient_accumulation_steps": 3, "gradient_clip": 0.5}),
    "average": (["EMAAddon"], {"decay": 0.5}),
    "compile": (["CompileAddon"], {"compile_target": "model"}),
    "together": (["AMPAddon", "GradientAccumulationAddon", "EMAAddon"],
                 {"precision": "bf16", "gradient_accumulation_steps": 2, "decay": 0.5}),
}


def make_case():
    torch.manual_seed(0)
    add_ons, options = CASES[sys.argv[1]]
    x = torch.rand(64, 3) + 0.1
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 1))
    trainer = Task.add_on(StateManagerAddon, LedgerAddon, *add_ons)(
        model, "cpu", optimizer=torch.optim.Adam(model.parameters(), lr=0.01), seed=1, log_bar=False,
        save_path="case", save_every=3, keep_last=None, ledger_path="case/ledger.jsonl", **options)
    return trainer, {"n_epoch": 2, "loader": loader}


def make_root():
    """The derivative of the root is infinite at 0: the loss is finite, and the gradient is not."""
    class Root(Task):
        def train_step(self, batch):
            out = super().train_step(batch)
            return {"loss": out["loss"] + 0 * (self.model[4].bias - self.model[4].bias.detach()).abs().sqrt().sum()}

    trainer, arguments = make_good()
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    return Root(trainer.model, "cpu", optimizer=optimizer, seed=1, log_bar=False), arguments


def make_devices():
    trainer, arguments = make_good()
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    return Task.add_on(MultiGPUAddon)(trainer.model, ["cpu", "cpu"], optimizer=optimizer), arguments


def make_only():
    return make_good()[0]


EARLY = make_good()


def make_early():
    make_good()
    return EARLY
'''


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the script: "nan" ends at a NaN, and "good" comes to its end."""
    folder, working = tmp_path_factory.mktemp("replay"), Path.cwd()
    for name in ("nan", "good"):
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(SCRIPT, encoding="utf-8")
        os.chdir(folder / name)
        try:
            script = runpy.run_path("train.py")
            trainer, arguments = script["make_trainer" if name == "nan" else "make_good"]()
            if name == "good":
                trainer.run(**arguments)
            else:
                with pytest.raises(NonFiniteError):
                    trainer.run(**arguments)
        finally:
            os.chdir(working)
    return folder


@pytest.fixture
def runs(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of both runs, as the working folder; the copy must not change in the test."""
    shutil.copytree(origin, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs" / "good")
    return tmp_path / "runs"


def hashes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            for path in sorted(folder.rglob("*"))}  # fmt: skip


def replay(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    """Replay in the working folder, which may not change; return the answer."""
    capsys.readouterr()
    before, level = hashes(Path.cwd()), sys.dont_write_bytecode
    assert main(["replay", "--json", *words]) == status
    assert hashes(Path.cwd()) == before
    assert sys.dont_write_bytecode == level
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    before = hashes(Path.cwd())
    assert main(["replay", *words]) == 2
    assert hashes(Path.cwd()) == before
    return capsys.readouterr().err


def test_loggers_of_the_task_itself_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The task is derived from a class with a logger and checkpoints; nothing is logged into the folder of the run."""
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    trainer, arguments = runpy.run_path("train.py")["make_derived"]()
    trainer.run(**arguments)
    answer = replay(capsys, "train.py:make_derived", "--step", "6")
    assert (answer["same"], answer["compared"], answer["began_after"]) == (True, 2, 4)


def test_a_nan_is_found(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The step that ended the run: its samples, the first module, the first gradient; the steps before are equal."""
    monkeypatch.chdir(runs / "nan")
    last = max(read_ledger("run"))
    answer = replay(capsys, "train.py", "--step", str(last + 1), status=1)
    assert Path(answer["checkpoint"]).name == f"step-{last // 4 * 4:08}"
    assert answer["began_after"] == last // 4 * 4
    assert answer["same"] is True
    assert answer["compared"] == last - last // 4 * 4
    assert answer["failed"] is None
    (row,) = answer["steps"]
    assert row["step"] == last + 1
    assert 37 in row["samples"][0]
    assert str(row["losses"][0]) == "nan"
    assert row["module"] == {"name": "0", "type": "Log", "finite_inputs": True, "finite_weights": True}
    assert row["gradient"] == "4.bias"
    assert row["outputs"]["0"]["not_finite"] == 3
    assert answer["notes"] == [f"the run itself ends at step {last + 1}: on_nonfinite='raise'"]

    assert main(["replay", "train.py", "--step", str(last + 1)]) == 1
    out, err = capsys.readouterr()
    assert "the first output is that of 0, a Log; its inputs are finite, its weights are finite" in out
    assert "in the order of the backward, is that of 4.bias" in out
    assert "3 of 12 not finite" in out
    assert err == ""
    assert f"step {last + 1} (epoch 1, batch {last + 1}) is not finite" in refuse(capsys, "train.py", "--step", "30")


def test_the_steps_are_those_of_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the end of an epoch, each stage of each step is that of the ledger; so are the shown losses and samples."""
    answer = replay(capsys, "train.py:make_good", "--step", "15", "--to", "18")
    known = read_ledger("run")
    assert answer["began_after"] == 12
    assert answer["compared"] == 6
    assert answer["same"] is True
    assert [(row["step"], row["epoch"], row["batch"]) for row in answer["steps"]] == [
        (15, 1, 15), (16, 1, 16), (17, 2, 1), (18, 2, 2)]  # fmt: skip
    for row in answer["steps"]:
        stages = known[row["step"]]["stages"]
        assert row["losses"] == stages["forward"]["loss"]
        assert row["samples"] == stages["batch"]["data"]
        assert list(row["outputs"]) == ["0", "1", "2", "3", "4", ""]
        assert row["is_finite"]
        assert row["module"] is None
        assert list(row["gradients"]) == ["1.weight", "1.bias", "4.weight", "4.bias"]
        assert all(norm > 0 for norm in row["gradients"].values())
        assert -1 <= row["outputs"]["3"]["least"] < row["outputs"]["3"]["largest"] <= 1  # Of Tanh.


def test_a_difference_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data of another script, and a ledger that is not that of the run; both in words."""
    answer = replay(capsys, "train.py:make_good", "--step", "6", "--ledger", "../nan/run/ledger.jsonl")
    assert answer["same"] is True  # Neither run has seen the bad sample yet.
    text = Path("run/ledger.jsonl").read_text(encoding="utf-8")
    loss = str(read_ledger("run")[6]["stages"]["forward"]["loss"])
    Path("other.jsonl").write_text(text.replace(loss, "[0.5]"), encoding="utf-8")
    answer = replay(capsys, "train.py:make_good", "--step", "6", "--ledger", "other.jsonl", status=1)
    assert answer["same"] is False
    assert main(["replay", "train.py:make_good", "--step", "6", "--ledger", "other.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "the runs differ at step 6, in the stage 'forward': the loss differs (the same up to step 5)" in out
    assert "ledger: [0.5]" in out
    assert f"replay: {loss}" in out


def test_where_it_begins(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the nearest whole checkpoint, at one that is given, or at the beginning; each is equal to the ledger."""
    answer = replay(capsys, "train.py:make_good", "--step", "8", "--from", "run/step-00000004")
    assert answer["began_after"] == 4
    assert answer["same"] is True
    answer = replay(capsys, "train.py:make_good", "--step", "4")
    assert answer["checkpoint"] is None
    assert answer["same"] is True
    assert answer["compared"] == 4
    assert answer["notes"] == ["run has no checkpoint before step 4"]
    weights = Path("run/step-00000008/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    answer = replay(capsys, "train.py:make_good", "--step", "9")
    assert answer["began_after"] == 4
    assert answer["same"] is True
    assert "passed over run/step-00000008: " in answer["notes"][0]
    shutil.rmtree("run")
    answer = replay(capsys, "train.py:make_good", "--step", "2")
    assert answer["same"] is None
    assert not Path("run").exists()


def test_a_gradient_that_is_not_finite(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No module made it: the answer says so, and names the parameter; without checkpoints and ledger."""
    answer = replay(capsys, "train.py:make_root", "--step", "1", status=1)
    (row,) = answer["steps"]
    assert row["module"] is None
    assert row["gradient"] == "4.bias"
    assert not row["is_finite"]
    assert row["losses"][0] > 0
    assert row["gradients"]["4.weight"] > 0
    assert answer["notes"] == ["the trainer has no save_path, and thus no checkpoint to begin with"]
    assert main(["replay", "train.py:make_root", "--step", "1"]) == 1
    assert "the outputs of all modules are finite; it arises in train_step" in capsys.readouterr().out


def test_what_cannot_be_replayed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in words, and nothing is written."""
    good = "train.py:make_good"
    assert "give a step of at least 1" in refuse(capsys, good, "--step", "0")
    assert "--to not before it" in refuse(capsys, good, "--step", "5", "--to", "4")
    assert "the run ends at step 32, before step 99" in refuse(capsys, good, "--step", "99")
    assert "tran.py does not exist; did you mean 'train.py'" in refuse(capsys, "tran.py", "--step", "1")
    assert "no-such" in refuse(capsys, good, "--step", "5", "--from", "run/no-such")
    assert "the checkpoint has step 8; give one before step 5" in refuse(
        capsys, good, "--step", "5", "--from", "run/step-00000008"
    )
    assert "no-such.jsonl contains no ledger" in refuse(capsys, good, "--step", "5", "--ledger", "no-such.jsonl")
    assert "without the arguments of its run" in refuse(capsys, "train.py:make_only", "--step", "5")
    assert "is not the last one that it made" in refuse(capsys, "train.py:make_early", "--step", "5")
    assert "the trainer has 2 devices, and a replay is one process" in refuse(
        capsys, "train.py:make_devices", "--step", "5"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in refuse(capsys, good, "--step", "5")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["amp", "fp16", "accumulation", "average", "compile", "together"])
def test_with_other_add_ons(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of a run with lower precision, accumulation or compilation are those of its ledger, bitwise."""
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train.py", case])
    trainer, arguments = runpy.run_path("train.py")["make_case"]()
    trainer.run(**arguments)
    last = max(read_ledger("case"))
    begin = (last - 2) // 3 * 3
    answer = replay(capsys, "train.py:make_case", "--step", str(last - 1), "--to", str(last), "--", case)
    assert (answer["same"], answer["began_after"], answer["compared"]) == (True, begin, last - begin)
    for row in answer["steps"]:
        assert row["is_finite"]
        assert len(row["losses"]) == len(read_ledger("case")[row["step"]]["stages"]["forward"]["loss"])
        assert bool(row["outputs"]) == (case != "compile")


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of the page, replayed, prints what stands there, but for the last digits of another machine."""
    text = find_page("compare_and_replay").read_text(encoding="utf-8")
    page = text.partition("\n## Replay a step\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.S)
    Path("train.py").write_text(blocks[0][1], encoding="utf-8")
    trainer, arguments = runpy.run_path("train.py")["make_trainer"]()
    with pytest.raises(NonFiniteError) as caught:
        trainer.run(**arguments)
    assert re.search(r"The run ends with `(.*?)`", page)[1] in str(caught.value)  # type: ignore[index]
    commands = [(text, then[1]) for (kind, text), then in pairwise(blocks) if kind == "bash"]
    assert len(commands) == 1
    for command, printed in commands:
        capsys.readouterr()
        main(shlex.split(command)[3:])
        out = capsys.readouterr().out.splitlines()
        shown = printed.splitlines()
        assert [shape(line) for line in out] == [shape(line) for line in shown]
        assert [line for line in out if "samples" in line] == [line for line in shown if "samples" in line]
        numbers = [
            [float(each) for line in lines for each in re.findall(r"-?\d+\.\d+", line)] for lines in (out, shown)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)
