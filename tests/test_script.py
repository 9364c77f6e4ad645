"""`python -m zae plan` and `explain` of a script: what they show and change, and every mistake in words."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zae.cli import main

SCRIPT = """
import sys
import kept
import torch
from zae import Trainer
from zae.addons import EMAAddon, StateManagerAddon

print("said by the script", sys.argv[1:])

class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}
    test_step = train_step

def make(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Task.add_on(EMAAddon, StateManagerAddon)(model, "cpu", optimizer=optimizer, save_path="run", **options)

def make_trainer():
    kept.made.append(make())
    return kept.made[-1], {"n_epoch": 3, "loader": [torch.ones(4, 2)] * 5, "valid_loader": [torch.ones(4, 2)]}

def alone(): return make()
def number(): return 3
def nothing(): pass
def several(): return make(), 1, 2
def the_class(): return Task
def with_arguments(model, lr): pass
def misspelt(): return make(), {"n_epochs": 3, "loader": []}
def without_loader(): return make(), {"n_epoch": 3}
def no_epochs(): return make(), {"n_epoch": 0.5, "loader": [torch.ones(4, 2)]}
def unknown_option(): return make(gradient_clp=1.0), {}
def deep(n=30): return deep(n - 1) if n else wider(n)
def wider(n): return deeper(n)
def deeper(n): return torch.nn.Linear(2, 1)(torch.ones(3, 3))
not_callable = 3
if __name__ == "__main__":
    raise SystemExit("it was started")
"""


@pytest.fixture(autouse=True)
def script() -> Iterator[None]:
    """A script and a module that it imports, in the present folder."""
    Path("train.py").write_text(SCRIPT)
    Path("kept.py").write_text("made = []\n")
    yield
    sys.modules.pop("kept", None)


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    return status, *capsys.readouterr()


def test_plan_shows_the_run_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of ``trainer.plan``; no file, not even of bytecode; the path and the arguments are put back."""
    before = sorted(os.listdir()), sys.argv[:], sys.path[:], sys.dont_write_bytecode
    status, said, error = called(capsys, "plan", "train.py", "--", "--lr", "0.1")
    assert (status, error) == (0, "")
    assert said.startswith("said by the script ['--lr', '0.1']\nPlan of Task[EMAAddon, StateManagerAddon]\n")
    assert "15 in this run" in said
    assert (sorted(os.listdir()), sys.argv, sys.path, sys.dont_write_bytecode) == before
    assert "train" not in sys.modules
    trainer = sys.modules["kept"].made[0]
    assert trainer.progress_checker.step == 0
    assert "train/loss" not in str(trainer.metrics)
    status, said, error = called(capsys, "plan", "train.py:make_trainer", "--json")
    assert error == "said by the script []\n", "standard output has the object alone"
    found = json.loads(said)
    assert (status, found["steps"], found["saves_at"], found["batch_size"]) == (0, 15, [5, 10, 15], 4)
    assert found["learning_rates"] == {"lr": [0.1] * 15}
    assert found["memory"] == {"parameters": 12, "gradients": 12, "average": 12, "total": 36}
    assert sorted(os.listdir()) == before[0]


def test_explain_shows_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of ``trainer.explain``, of a trainer alone too."""
    status, said, _ = called(capsys, "explain", "train.py")
    assert (status, said.partition("\n")[2]) == (0, str(sys.modules["kept"].made[0].explain()))
    status, said, _ = called(capsys, "explain", "train.py:alone", "--json")
    found = json.loads(said)
    assert (status, found["add_ons"]) == (0, ["EMAAddon", "StateManagerAddon"])
    assert any("EMAAddon" in note for line in found["lines"] for note in line["notes"])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("trian.py", "trian.py does not exist; did you mean 'train.py'?"),
        (".", ". is a folder; give the file of a Python script: script.py:make_trainer"),
        ("train.py:make_trainr", "train.py has no function 'make_trainr' (it has make, make_trainer, alone,"),
        ("train.py:make_trainr", "; did you mean 'make_trainer'?"),
        ("train.py:not_callable", '; write one that ends with: return trainer, {"n_epoch": 3, "loader": loader}'),
        ("train.py:number", 'number() of train.py returned an int; write: return trainer, {"n_epoch": 3, '),
        ("train.py:nothing", "nothing() of train.py returned None; write: "),
        ("train.py:several", "returned a tuple of a Task[EMAAddon, StateManagerAddon], an int, an int; write: "),
        ("train.py:the_class", "returned the class Task, and not a trainer made of it; write: "),
        ("train.py:with_arguments", "needs model, lr; give each a default: it is called without"),
        ("train.py:alone", "returned a trainer without the arguments of its run; write: return trainer, {"),
        ("train.py:misspelt", "run() has no argument 'n_epochs'; did you mean 'n_epoch'?"),
        ("train.py:without_loader", "run(): missing a required argument: 'loader'; the script returned n_epoch"),
        (
            "train.py:unknown_option",
            "StateManagerAddon]; did you mean 'gradient_clip'?",
        ),
    ],
)
def test_what_is_wrong_is_said_in_words(target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2."""
    status, _, error = called(capsys, "plan", target)
    assert status == 2
    assert words in error
    assert "Traceback" not in error


def test_what_the_run_would_refuse_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1."""
    status, said, _ = called(capsys, "plan", "train.py:no_epochs")
    assert (status, said.splitlines()[1]) == (1, "the run would fail:")
    assert "n_epoch=0.5" in said
    status, said, _ = called(capsys, "plan", "train.py:no_epochs", "--json")
    assert status == 1
    assert json.loads(said)["refused"].startswith("ConfigError: n_epoch=0.5")


def test_a_script_that_raises_ends_in_its_own_frame(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 12 frames, none of them of a library, and then the error."""
    status, _, error = called(capsys, "explain", "train.py:deep")
    lines = error.rstrip().splitlines()
    assert (status, lines[:2]) == (2, ["deep() of train.py failed:", "  (21 more above)"])
    assert lines[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    shown = [line for line in lines if line.startswith("  File ")]
    assert len(shown) <= 12
    assert all('"train.py"' in line for line in shown)
    assert "in deeper" in shown[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_this_name\n", 'File "train.py", line 1, in <module>\n    import nothing_of_this_name\n'),
        ("def f(:\n", 'File "train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax'),
        ("import sys\nsys.exit(3)\n", "it ended itself with status 3. Arguments for the script go after --"),
    ],
)
def test_a_script_that_cannot_be_imported(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(text)
    status, _, error = called(capsys, "plan", "train.py")
    assert status == 2
    assert error.startswith("train.py failed as it was imported:")
    assert words in error
    assert "runpy" not in error
    assert "importlib" not in error
