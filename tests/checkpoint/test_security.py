"""Nothing that is read can run, lead elsewhere or be believed unchecked; nothing that is secret is written."""

from __future__ import annotations

import ast
import json
import logging
import os
import pickle
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zae
from kit import faults, hand
from kit.checkpoints import save_checkpoint
from zae.addons import EMAAddon, StateManagerAddon
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon
from zae.addons.loggers.neptune_logger import NeptuneLoggerAddon
from zae.addons.loggers.wandb_logger import WandBLoggerAddon
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.weights import load_weights
from zae.cli import main
from zae.errors import CheckpointDamaged, CheckpointMismatch, OptionError

ROOT = Path(zae.__file__).parent.parent
SOURCES = [path for folder in ("zae", "addons") for path in sorted((ROOT / folder).rglob("*.py"))]


def saving(folder: Path, *add_ons: Any, **options: Any) -> Any:
    model = faults.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return faults.Task.add_on(StateManagerAddon, *add_ons)(
        model, "cpu", optimizer=optimizer, save_path=folder, log_bar=False, seed=7, **options
    )


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path, how: str) -> None:
        self.mark, self.how = mark, how

    def __reduce__(self) -> Any:
        if self.how == "eval":
            return eval, (f"open({str(self.mark)!r}, 'w').close()",)
        return (os.mkdir, (str(self.mark),)) if self.how == "mkdir" else (open, (str(self.mark), "w"))


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("name", ["model.ckpt", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["zip", "pickle", "legacy"])
@pytest.mark.parametrize("how", ["eval", "mkdir", "open"])
def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path, name: str, kind: str, how: str) -> None:
    """A payload in any file, in any of torch's forms: by resume, load, restore and doctor, no mark appears."""
    made = saving(tmp_path / "run", save_format="ckpt")
    made.run(1, hand.loader(), [hand.data()[:4]])
    mark = tmp_path / "mark"
    path = made.last_path / name
    payload = {"weight": Payload(mark, how)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=kind == "zip")
    for load in (
        lambda: saving(tmp_path / "run", resume="auto").run(1, hand.loader()),
        made.load_state,
        made.restore_best,
    ):
        with pytest.raises(CheckpointDamaged, match=name.replace(".", r"\.")):
            load()
    assert main(["doctor", str(tmp_path / "run")]) == 1
    assert not mark.exists()
    weights = tmp_path / "weights.ckpt"
    shutil.copy(path, weights)
    with pytest.raises(CheckpointDamaged, match="not loaded: contains code"):
        made.apply_weights(weights)
    assert not mark.exists()


BANNED = {"eval", "exec", "compile", "__import__", "loads_pickle"}
MARSHAL = ("marshal.load", "marshal.loads")  # To write with it is harmless.


def dangerous(tree: ast.AST) -> list[str]:
    """The calls by which a file could become code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "marshal":
            found.append("from marshal import")  # A call by another name would not be seen.
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            found += [f"import {name}" for name in names if name.split(".")[0] in ("shelve", "dill", "yaml")]
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if text in BANNED or text in ("pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load", *MARSHAL):
            found.append(text)
        if text == "torch.load" and keywords.get("weights_only") != "True":
            found.append(text)
        if text.endswith("load") and keywords.get("allow_pickle") == "True":
            found.append(text)
    return found


def test_no_call_in_the_package_makes_code_of_a_file() -> None:
    """No pickle, eval or torch.load without weights_only=True, but in the two places that say why."""
    found = {f"{path.parent.name}/{path.name}": dangerous(ast.parse(path.read_text())) for path in SOURCES}
    found = {name: calls for name, calls in found.items() if calls}
    trusted = found.pop("checkpoint/ckpt_files.py")
    assert trusted == ["torch.load"], "_read_trusted, which trust_pickle=True asks for"
    # A spawned rank and its parent are one program and talk through a pipe of their own; no file is read there. What
    # proves an add-on reads back what it has itself pickled.
    allowed = {
        name: {"pickle.loads", "torch.load"}
        for name in ("distributed/rank_process.py", "distributed/spawn.py", "distributed/transfer.py")
    }
    allowed["distributed/collectives.py"] = {"pickle.loads"}  # Ranks too, as dist.all_gather_object does.
    allowed["testing/checks.py"] = {"pickle.loads"}
    assert {name: calls for name, calls in found.items() if not set(calls) <= allowed.get(name, set())} == {}
    assert len(SOURCES) > 40


def test_the_search_finds_what_it_looks_for() -> None:
    """Each banned call is found in a text that holds it."""
    calls = ["eval(x)", "torch.load(p)", "torch.load(p, weights_only=False)", "pickle.loads(b)", "marshal.loads(b)"]
    text = "\n".join(["import yaml", "from marshal import loads", *calls, "np.load(p, allow_pickle=True)"])
    assert len(dangerous(ast.parse(text))) == 8


def test_trust_is_asked_for_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Code is run only by an argument, with a warning that names the file; no resume takes the argument."""
    path = tmp_path / "old.pt"
    torch.save(hand.network(), path)
    with pytest.raises(CheckpointDamaged, match="contains code"):
        load_weights(path)
    assert caplog.records == []
    weights = load_weights(path, trust_pickle=True)
    assert weights.keys() == hand.network().state_dict().keys()
    assert str(path) in caplog.text
    with pytest.raises(OptionError, match="trust_pickle"):
        saving(tmp_path / "run", resume="auto", trust_pickle=True)
    text = "\n".join(path.read_text() for path in SOURCES)
    assert "TRUST" not in text.replace("trust_pickle", ""), "no environment variable"
    torch.save([1, 2], path)
    with pytest.raises(CheckpointDamaged, match="contains a list"):
        load_weights(path, trust_pickle=True)


def test_a_resume_opens_nothing_elsewhere(tmp_path: Path) -> None:
    """Of a checkpoint whose manifest and links point elsewhere, nothing outside of the folder is opened."""
    made = saving(tmp_path / "run")
    made.run(1, hand.loader())
    (tmp_path / "secret").write_text("secret")
    checkpoint = made.last_path

    def hostile(change: Any) -> Any:
        place = tmp_path / "hostile" / "step-00000006"
        shutil.rmtree(tmp_path / "hostile", ignore_errors=True)
        shutil.copytree(checkpoint, place)
        change(place)
        opened: list[str] = []

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(args[0], str) and str(tmp_path) in os.path.abspath(args[0]):
                opened.append(os.path.abspath(args[0]))

        import sys

        sys.addaudithook(hook)
        error = ""
        try:
            load_checkpoint(place)
        except CheckpointDamaged as damaged:
            error = str(damaged)
        return error, [path for path in opened if not path.startswith(str(place))]

    def renamed(name: str) -> Any:
        def change(place: Path) -> None:
            path = place / "manifest.json"
            content = json.loads(path.read_text())
            content["files"][name] = content["files"].pop("state.json")
            from zae.checkpoint.manifest import seal

            path.write_bytes(seal(content))

        return change

    def linked(place: Path) -> None:
        (place / "state.json").unlink()
        (place / "state.json").symlink_to(tmp_path / "secret")

    changes = [
        renamed(name) for name in ("../secret", str(tmp_path / "secret"), "a/../../../secret", "..\\secret", "x\0")
    ]
    for change in [*changes, linked]:
        error, elsewhere = faults.answer(hostile, change)
        assert error
        assert elsewhere == []


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any) -> None:
    """Keys, tokens and passwords of every logger and of the environment: in no checkpoint, log, repr or error."""
    caplog.set_level(logging.DEBUG)
    canary = "canary0123456789abcdef0123456789abcdef01234"[:40]
    for name in ("WANDB_API_KEY", "NEPTUNE_API_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, canary)
    logs = {
        "wandb": {"mode": "disabled", "api_key": canary, "notes": f"https://me:{canary}@host/x"},
        "neptune": {"mode": "debug", "api_token": canary, "capture_stdout": False, "capture_stderr": False,
                    "capture_hardware_metrics": False},
    }  # fmt: skip

    class Failing(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.step == 9:
                raise ValueError("an error of the user's own")
            return super().train_step(batch)

    model = faults.classifier()
    made = Failing.add_on(StateManagerAddon, EMAAddon, WandBLoggerAddon, NeptuneLoggerAddon, JSONLLoggerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=tmp_path / "run", decay=0.9,
        web_logger=logs, jsonl_path=tmp_path / "log.jsonl", log_bar=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="user's own") as caught:
        made.run(3, hand.loader())
    assert (tmp_path / "run" / "crash-00000009").is_dir()
    main(["doctor", str(tmp_path / "run")])
    out = capsys.readouterr()
    import traceback

    said = repr(made) + str(made.explain()) + "".join(traceback.format_exception(caught.value))
    assert canary not in said + out.out + out.err + caplog.text
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 8
    assert [path for path in written if canary.encode() in path.read_bytes()] == []


def test_nobody_else_can_write(tmp_path: Path) -> None:
    """With umask 022 and with none, nothing that a run makes can be written by others."""
    for umask in (0o022, 0):
        place = tmp_path / str(umask)
        before = os.umask(umask)
        try:
            saving(place).run(1, hand.loader())
        finally:
            os.umask(before)
        for path in [place, *place.rglob("*")]:
            assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


def test_text_of_a_checkpoint_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names in a state become no path and no colour of a terminal."""
    caplog.set_level(logging.DEBUG, "zae")
    made = saving(tmp_path / "run")
    made.run(1, hand.loader())
    manifest, model, state = load_checkpoint(made.last_path)
    state["StateManagerAddon"] = {"run_id": "\x1b[31m%s%n{0}", "scores": {"../../outside": 0.5, "step-00000006": None}}
    about = {key: manifest[key] for key in ("step", "epoch", "composition", "world_size")}
    about["run_id"] = "\x1b[31m%s%n{0}"
    save_checkpoint(made.last_path, model, state, manifest_info=about)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "keep").write_text("")
    again = saving(tmp_path / "run", resume=True, keep_last=1, keep_best=0, save_every=1)
    again.run(2, hand.loader())
    assert (tmp_path / "outside" / "keep").exists()
    assert "\x1b" not in caplog.text
    assert again.last_path.name == "step-00000012"


def test_names_of_a_forged_state_reach_no_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What an error or a warning quotes of a state, and of a file of weights, is escaped."""
    made = saving(tmp_path / "run")
    made.run(1, hand.loader())
    evil = "\x1b]0;evil\x07"
    state = made.state_dict()
    group = {"params": [0, 1, 2, 3, 4, 5], evil: 1}
    forged = [
        {**state, evil: {}},
        {**state, "model": {**state["model"], evil: torch.ones(1)}},
        {**state, "optimizer": {"0": {"state": {}, "param_groups": [group]}}},
    ]
    for each in forged:
        with pytest.raises(CheckpointMismatch) as caught:
            made.load_state_dict(each)
        assert str(caught.value).isprintable()
    made.load_state_dict(forged[0], strict=False)
    assert "\\x1b]0;evil\\x07" in caplog.text
    assert "\x1b" not in caplog.text
    with pytest.raises(CheckpointMismatch, match=r"1 unexpected \(\\x1b\]0;evil\\x07\)"):
        made.apply_weights(forged[1]["model"])


def test_every_file_is_read_without_pickle(tmp_path: Path) -> None:
    """JSON is JSON, tensors are safetensors or load with weights_only=True."""
    for kind in ("safetensors", "ckpt"):
        made = saving(tmp_path / kind, EMAAddon, save_format=kind, decay=0.9)
        made.run(1, hand.loader())
        for path in made.last_path.iterdir():
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".ckpt":
                assert isinstance(torch.load(path, weights_only=True), dict)
            else:
                import safetensors.torch

                assert safetensors.torch.load_file(path)
    assert issubclass(nn.Sequential, nn.Module)
