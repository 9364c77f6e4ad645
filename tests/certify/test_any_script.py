"""`python -m zae certify` on scripts of users: its verdict is that of the comparison in test_by_hand.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.scripts_that_resume import CASES, MISTAKES, SCRIPTS, TORCHRUN
from zae.cli import main

EVERY_RUN = ("skorch", "ignite, deterministic")


def certify(
    name: str, kills: int, only: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Certify a script in the working folder; return what is said of a promise."""
    case = CASES[name]
    command = case.command(Path())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = ["--kills", str(kills), "--only", only, "--json"]
    if case.resume_with:
        options += ["--resume-with", " ".join(case.resume_with)]
    status = main(["certify", *options, *(["--"] if case.launcher else []), *command])
    said, error = capsys.readouterr()
    assert status in (0, 1), error
    promises = {each["name"]: each for each in json.loads(said)["promises"]}
    assert promises["repeatable"]["verdict"] == "passed", promises
    return next(each for each_name, each in promises.items() if only in each_name)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", [each if each in EVERY_RUN else pytest.param(each, marks=pytest.mark.exhaustive) for each in CASES]
)
def test_the_verdict_is_that_by_hand(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed at a step ends as one that is not, or the cause is named."""
    case = CASES[name]
    found = certify(name, 2, "saves survive" if case.in_save else "resume is exact", capsys, monkeypatch)
    assert (found["cause"] or "") == case.cause, found
    assert found["verdict"] == ("failed" if case.cause else "passed")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [each for each in CASES if each not in MISTAKES])
def test_the_verdict_of_twenty_kills(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not depend on where the kills are."""
    found = certify(name, 20, "resume is exact", capsys, monkeypatch)
    assert (found["cause"] or "") == CASES[name].cause, found


ACCUMULATES = """
import os
import torch

torch.manual_seed(0)
data = torch.randn(100, 8, 10)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["batch"]
for batch in range(first, 100):
    model(data[batch]).square().mean().backward()
    if (batch + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
    if (batch + 1) % 10 == 5:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batch": batch + 1}
        torch.save(state, "new.pt")
        os.replace("new.pt", "last.pt")
"""


@pytest.mark.exhaustive
def test_a_save_within_an_accumulated_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The gradients of the batches before the save are lost; the page says so."""
    Path("train.py").write_text(ACCUMULATES)
    assert main(["certify", "--kills", "1", "--only", "resume", "--json", "train.py"]) == 1
    promises = json.loads(capsys.readouterr().out)["promises"]
    found = next(each for each in promises if each["name"] == "resume is exact")
    assert found["cause"] == "samples"
    assert "between the batches of an accumulated step" in found["message"]


@pytest.mark.exhaustive
def test_the_error_of_a_rank_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    """Not that of torchrun, which says that a rank has failed."""
    text = SCRIPTS.joinpath("with_ddp.py").read_text()
    Path("train.py").write_text(text.replace("DistributedSampler(dataset)", "DistributedSampler(dataset, rank=5)"))
    assert main(["certify", "--", *TORCHRUN, "train.py"]) == 2
    assert "ValueError: Invalid rank 5" in capsys.readouterr().err
