"""`python -m zae certify`: scripts as they are, killed for real; what is wrong is named by its cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zae.cli import main

SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(48, 4)
order = torch.Generator().manual_seed(0)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=48)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    order.set_state(state["order"])
    torch.set_rng_state(state["random"])
    first = state["step"]
step = 0
for epoch in range(2):
    begin = order.get_state()
    if first >= 12 * (epoch + 1):
        step += 12
        continue
    for xs, ys in loader:
        step += 1
        if step <= first:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xs), ys).backward()
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                     "scheduler": scheduler.state_dict(), "random": torch.get_rng_state(),
                     "order": begin if step % 12 else order.get_state()}
            torch.save(state, "new.pt")
            os.replace("new.pt", "last.pt")
"""


def certify(capsys: pytest.CaptureFixture[str], script: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and what was found of each promise."""
    Path("train.py").write_text(script)
    before = sorted(map(str, Path().rglob("*")))
    status = main(["certify", "--json", *options, "train.py"])
    said, error = capsys.readouterr()
    assert said, error
    assert sorted(map(str, Path().rglob("*"))) == before
    return status, {each["name"]: each for each in json.loads(said)["promises"]}


def test_a_right_script_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """A kill at a step, and one in the middle of a save."""
    Path("page.html").touch()
    status, found = certify(capsys, SCRIPT, "--kills", "2", "-o", "page.html")
    assert status == 0, found
    page = Path("page.html").read_text()
    assert "in the middle of writing new.pt" in page
    assert "kill 2" in page
    tried = {name: each["verdict"] for name, each in found.items() if each["verdict"] != "not tried"}
    assert tried == {"repeatable": "passed", "resume is exact": "passed", "saves survive a kill": "passed"}


MISTAKES = {
    "optimizer state": ('optimizer.load_state_dict(state["optimizer"])', "pass"),
    "learning rate": ('scheduler.load_state_dict(state["scheduler"])', "pass"),
    "random state": ('torch.set_rng_state(state["random"])', "pass"),
    "samples": ('order.set_state(state["order"])', "order.manual_seed(1)"),
    "weights": ('model.load_state_dict(state["model"])', 'model[:4].load_state_dict({k: v for k, v in '
                'state["model"].items() if k < "4"})'),
    "buffers": ('model.load_state_dict(state["model"])', 'model.load_state_dict({k: v for k, v in '
                'state["model"].items() if "running" not in k}, strict=False)'),
    "repeated work": ("if step <= first:", "if False:"),
    "does not resume": ('if os.path.exists("last.pt")', "if False"),
}  # fmt: skip
ALWAYS = ("random state",)


@pytest.mark.parametrize(
    "cause", [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.exhaustive) for each in MISTAKES]
)
def test_a_mistake_is_named_by_its_cause(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = SCRIPT.replace(*MISTAKES[cause])
    assert script != SCRIPT
    status, found = certify(capsys, script, "--kills", "1", "--only", "resume")
    assert (status, found["resume is exact"]["cause"]) == (1, cause), found


LOSS = "nn.functional.cross_entropy(model(xs), ys)"
UNSTEADY = {
    "time": (LOSS, f"(__import__('time').time_ns() % 1000 * {LOSS})", "the loss ("),
    "dropout": ("first = 0", "torch.seed(); first = 0", "the random state before it"),
    "python": (LOSS, f"(__import__('random').random() * {LOSS})", "the random state before it"),
}


@pytest.mark.parametrize(
    "why", ["time", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("dropout", "python"))]
)
def test_two_runs_differ_by_what_a_step_depends_on(why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by a random stream that nobody seeds, and that no step draws from."""
    old, new, words = UNSTEADY[why]
    assert old in SCRIPT
    status, found = certify(capsys, SCRIPT.replace(old, new), "--kills", "0", "--only", "repeatable")
    assert status == 1
    assert f"two runs differ first in step 1: {words}" in found["repeatable"]["message"]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, at once."""
    for arguments, words in {
        ("absent.py",): "absent.py is not a file; give the script as you start it",
        (): "there is no script to certify; write: python -m zae certify train.py",
        ("--", "no-such-launcher", "train.py"): "no-such-launcher is neither a Python file nor a program",
        ("--only", "speed", "setup.py"): "--only 'speed' is part of no promise; there are repeatable, ",
    }.items():
        Path("setup.py").touch()
        assert main(["certify", *arguments]) == 2
        assert words in capsys.readouterr().err
