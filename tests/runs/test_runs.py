"""`python -m zae runs`: the tree of runs, forks and resumes, from the manifests of their checkpoints alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from zae.addons import EMAAddon, LoggerAddon, StateManagerAddon
from zae.addons.state_manager.provenance import describe_code
from zae.checkpoint.manifest import read_manifest, seal
from zae.cli import main
from zae.script import import_file


def build(folder: Path | str, *add_ons: Any, lr: float = 0.1, **options: Any) -> Any:
    model = faults.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return faults.Task.add_on(StateManagerAddon, *add_ons)(
        model, "cpu", optimizer=optimizer, save_path=folder, keep_last=None, log_bar=False, **options
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed, two forks of it, a fork of a fork, and the same run resumed in another folder."""
    top: Path = tmp_path_factory.mktemp("runs")
    loader, valid = hand.loader(), [hand.data()[:4]]
    build(top / "base").run(2, loader, valid)
    build(top / "base", resume=True, gradient_clip=1.0).run(3, loader, valid)
    build(top / "mean", EMAAddon, lr=0.01, decay=0.9, start_from=top / "base" / "step-00000012").run(1, loader, valid)
    build(top / "late", start_from=top / "base", start_with=("model", "optimizer")).run(1, loader)
    build(top / "more" / "deep", EMAAddon, lr=0.01, decay=0.8, start_from=top / "mean").run(1, loader)
    build(top / "moved", resume=top / "base" / "step-00000006").run(2, loader)
    return top


@pytest.fixture
def top(trained: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def look(capsys: pytest.CaptureFixture[str], *folders: Path | str) -> tuple[int, dict[str, Any], str]:
    """Return the status, the data and the text."""
    status = main(["runs", *map(str, folders), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert main(["runs", *map(str, folders)]) == status
    text = capsys.readouterr().out
    assert all(each.isprintable() for each in text.splitlines())
    return status, {"by_name": {Path(each["folder"]).name: each for each in data["runs"]}, **data}, text


DEFINED = """
import torch
from zae import AddOnBase, Trainer

class Block(torch.nn.Linear):
    pass

class Task(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {{"loss": {factor} * torch.nn.functional.cross_entropy(self.model(x), y)}}

    test_step = train_step

class CountAddon(AddOnBase):
    "Count."
    state_attributes = ("count",)
    count = 0

def loader(size):
    data = torch.utils.data.TensorDataset(torch.ones(size, 3), torch.zeros(size, dtype=torch.long))
    data.fingerprint = str(size)
    return torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(4)), 2)

def train(size, **options):
    model = torch.nn.Sequential(torch.nn.Flatten(), Block(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Task.add_on("StateManagerAddon", CountAddon)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
    trainer.run(1, loader(size))
"""


def test_code_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Classes of the user count by their file, and datasets by their fingerprint."""
    for name, factor, size, start in [
        ("base", 1, 8, None), ("same", 1, 8, "base"), ("code", 2, 8, "base"), ("data", 2, 9, "code")
    ]:  # fmt: skip
        file = tmp_path / "train.py"
        file.write_text(DEFINED.format(factor=factor))
        start_from = None if start is None else tmp_path / start
        import_file(file, f"of_{name}").train(size, save_path=tmp_path / name, start_from=start_from)  # type: ignore[attr-defined]
    found = look(capsys, tmp_path)[1]["by_name"]
    code = {name: found[name]["code"] for name in found}
    assert code["base"].keys() == {"train.py"}
    assert found["base"]["versions"]["torch"] == torch.__version__
    assert found["base"]["versions"].keys() == {"python", "torch"}
    assert found["base"]["data"].items() >= {"dataset": "Subset", "dataset length": 4, "fingerprint": "8"}.items()
    assert found["same"]["differs"] == []
    differs = [{"name": "code of train.py", "before": code["base"]["train.py"], "after": code["code"]["train.py"]}]
    assert found["code"]["differs"] == differs
    assert found["data"]["differs"] == [{"name": "data: fingerprint", "before": "8", "after": "9"}]
    assert f"code of train.py {code['base']['train.py']} -> {code['code']['train.py']}\n" in look(capsys, tmp_path)[2]


def test_the_file_of_a_class(tmp_path: Path) -> None:
    """A file that is imported again after a change has another hash; a class of a console has none."""
    file, found = tmp_path / "task.py", []
    for factor in (1, 2):
        file.write_text(DEFINED.format(factor=factor))
        module: Any = import_file(file, "of_a_notebook")
        found.append(describe_code(module.Task, module.Block(3, 2))["code"])
    assert found[0].keys() == found[1].keys() == {"task.py"}
    assert found[0] != found[1]
    space: dict[str, Any] = {"Module": torch.nn.Module, "__name__": "of_a_console"}
    exec("class Typed(Module):\n    pass", space)
    assert describe_code(faults.Task, space["Typed"]())["code"].keys() == {"faults.py"}


def forge(checkpoint: Path, **changed: Any) -> None:
    """Change entries of the info of a manifest, and seal it as its author could."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_bytes())
    path.write_bytes(seal({**content, "info": {**content["info"], **changed}}))


def test_the_tree(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run is below the one that it started from, by the step, with what differs."""
    status, data, text = look(capsys, top)
    ids = {name: run["run_id"][:8] for name, run in data["by_name"].items()}
    scores = {name: run["best"] for name, run in data["by_name"].items()}
    wanted = f"""\
{top}
base  run {ids["base"]}  steps 6 to 18  best loss {scores["base"]["score"]:.6g} at step {scores["base"]["step"]}
│  StateManagerAddon
│  resumed at step 12
│  from step 18: gradient_clip default -> 1.0
├─ moved  run {ids["base"]}  step 12
│     StateManagerAddon
│     the same run, resumed here at step 6: gradient_clip 1.0 -> default
│     resumed at step 6
├─ mean  run {ids["mean"]}  step 6  best loss {scores["mean"]["score"]:.6g} at step 6
│  │  EMAAddon, StateManagerAddon
│  │  started at step 12 with model: +EMAAddon, optimizer.lr 0.1 -> 0.01, decay default -> 0.9
│  └─ more/deep  run {ids["deep"]}  step 6
│        EMAAddon, StateManagerAddon
│        started at step 6 with model: decay 0.9 -> 0.8
└─ late  run {ids["late"]}  step 6
      StateManagerAddon
      started at step 18 with model, optimizer: gradient_clip 1.0 -> default
"""
    without_scores = [line.partition("  best")[0] if "late" in line or "deep" in line else line for line in
                      text.splitlines()]  # fmt: skip
    assert status == 0
    assert without_scores == wanted.splitlines()
    base = data["by_name"]["base"]
    held = [read_manifest(top / "base" / f"step-{step:08d}")["info"] for step in (6, 12, 18)]
    assert [each["resumed_at"] for each in held] == [[], [], [12]]
    assert base["best"]["score"] == min(each["score"] for each in held)
    assert data["by_name"]["mean"]["differs"][0] == {"name": "EMAAddon", "before": None, "after": "EMAAddon"}
    assert data["by_name"]["deep"]["drawn_under"]["run_id"] == data["by_name"]["mean"]["run_id"]


def test_a_parent_that_is_not_here(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was deleted, or it is in a folder that was not given; a fork is not put under another branch of that run."""
    base = read_manifest(top / "base" / "step-00000018")["run_id"]
    _, data, text = look(capsys, top / "more", top / "mean")
    assert data["by_name"]["deep"]["drawn_under"]["folder"] == str(top / "mean")
    assert f"{top / 'mean'}  run " in text
    shutil.rmtree(top / "base")
    status, data, text = look(capsys, top)
    assert status == 0
    assert {name: run["relation"] for name, run in data["by_name"].items()} == {
        "deep": "fork", "late": "gone", "mean": "fork", "moved": "new",
    }  # fmt: skip
    assert data["by_name"]["late"]["at_step"] == 18
    assert "   started from a run that is not here: " in text
    assert f"base/step-00000018, step 18 of run {base[:8]}\n" in text


def test_a_run_and_a_checkpoint_by_themselves(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is a run, one that is a checkpoint, one twice, and a copy."""
    assert [run["steps"] for run in look(capsys, top / "base")[1]["runs"]] == [[6, 12, 18]]
    assert [run["steps"] for run in look(capsys, top / "base" / "step-00000012")[1]["runs"]] == [[12]]
    assert len(look(capsys, top, top / "base")[1]["runs"]) == 5
    shutil.copytree(top / "base", top / "copy")
    assert look(capsys, top)[1]["by_name"]["copy"]["relation"] == "continued"
    assert "the same run, in another folder\n" in look(capsys, top)[2]


def test_weights_and_a_failed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run may start from a file of weights; the state of a failed one is shown."""
    torch.save(faults.classifier().state_dict(), tmp_path / "given.ckpt")

    class Failing(faults.Task):
        def train_step(self, batch: Any) -> Any:
            if self.progress_checker.step == 8:
                raise ValueError("on purpose")
            return super().train_step(batch)

    model = faults.classifier()
    trainer: Any = Failing.add_on(StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=tmp_path / "run",
        start_from=tmp_path / "given.ckpt", log_bar=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="on purpose"):
        trainer.run(2, hand.loader())
    status, data, text = look(capsys, tmp_path)
    assert status == 0
    assert f"started from weights: {tmp_path / 'given.ckpt'}\n" in text
    assert "failed at step 8: ValueError\n" in text
    assert data["runs"][0]["steps"] == [6]


def cut(top: Path) -> None:
    path = top / "base" / "step-00000012" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-100])


def lose(top: Path) -> None:
    (top / "base" / "step-00000012" / "manifest.json").unlink()


def block(top: Path) -> None:
    lose(top)
    os.mkfifo(top / "base" / "step-00000012" / "manifest.json")


@pytest.mark.parametrize("damage", [cut, lose, block])
def test_damaged(top: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, and the rest of the tree; nothing but manifests is read, so other damage is not seen."""
    for file in top.rglob("*.safetensors"):
        file.unlink()
    assert look(capsys, top)[0] == 0
    damage(top)
    status, data, text = look(capsys, top)
    assert status == 1
    assert list(data["damaged"]) == [str(top / "base" / "step-00000012")]
    assert data["by_name"]["base"]["steps"] == [6, 18]
    assert data["by_name"]["mean"]["drawn_under"]["folder"] == str(top / "base")
    assert f"damaged: {top / 'base' / 'step-00000012'}: " in text


def test_foreign_and_hostile(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Manifests of something else are named; forged ones neither break the tree nor reach the terminal."""
    (top / "web").mkdir()
    (top / "web" / "manifest.json").write_text('{"name": "an extension"}')
    shutil.move(top / "late", top / "web" / "late")
    (top / "loop").symlink_to(top)
    deep = "[" * 150 + "]" * 150
    big = {"$int": "0x" + "f" * 6000}
    runs = {name: read_manifest(top / name / "step-00000006") for name in ("mean", "more/deep")}
    forge(top / "mean" / "step-00000006", parent={"run_id": runs["more/deep"]["run_id"], "step": big, "path": "a\0b"},
          options={"\x1b[31mred": "\x1b]0;title\x07", "big": big, "deep": json.loads(deep)},
          resumed_at=[big, "x"], score=big, monitor=[1])  # fmt: skip
    forge(
        top / "moved" / "step-00000012",
        parent=[1],
        options=3,
        resumed_at="soon",
        monitor_mode={},
        score={"$float": "nan"},
    )
    status, data, text = look(capsys, top)
    assert status == 0
    assert list(data["foreign"]) == [str(top / "web")]
    assert "no checkpoint: " in text
    assert sorted(run["relation"] for run in data["runs"]) == ["circle", "continued", "fork", "fork", "new"]
    assert "\x1b" not in text
    assert "the manifests say that it started from itself" in text


def test_nothing_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, with what to give."""
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["runs", str(folder)]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert "give " in error
        assert str(folder) in error


def test_what_is_recorded(tmp_path: Path) -> None:
    """Options that are not the defaults, as short plain values without secrets, paths and addresses."""
    given = {
        "width": 3, "api_key": "sk-0123456789abcdef", "rate": float("inf"), "text": "x" * 300, "object": object(),
        "nested": {"a": [1, 2]}, **{f"n{number}": number for number in range(300)},
    }  # fmt: skip
    trainer = build(tmp_path / "run", EMAAddon, LoggerAddon, decay=0.9, seed=3, hyperparameters=given,
                    logger_fallback=tmp_path)  # fmt: skip
    trainer.run(1, hand.loader())
    options = read_manifest(trainer.last_path)["info"]["options"]
    assert {name: options[name] for name in ("decay", "seed", "keep_last", "optimizer.lr", "optimizer.name")} == {
        "decay": 0.9, "seed": 3, "keep_last": "None", "optimizer.lr": 0.1, "optimizer.name": "AdamW",
    }  # fmt: skip
    assert options["hyperparameters.width"] == 3
    assert options["hyperparameters.api_key"] == "***"
    assert options["hyperparameters.rate"] == float("inf")
    assert options["hyperparameters.nested.a"] == "[1, 2]"
    assert options["hyperparameters.text"].startswith("x" * 200 + "... (sha256 ")
    assert options["hyperparameters.object"] == "<object object>"
    assert len(options) == 201
    assert str(tmp_path) not in str(options)
    assert not {"resume", "overwrite", "save_path", "log_bar"} & options.keys()
