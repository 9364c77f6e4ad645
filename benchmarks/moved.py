"""Compare the programs of examples/moved by hand and with zae, and kill the latter twice; write the table of the page.

``python benchmarks/moved.py`` takes two minutes of one core.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from _generators import replace_between  # noqa: E402

FOLDER = ROOT / "examples" / "moved"
PAGE = ROOT / "docs" / "moving" / "programs.md"
PROGRAMS = {
    "mnist": "pytorch/examples, mnist",
    "vae": "pytorch/examples, vae",
    "dcgan": "pytorch/examples, dcgan",
    "word_language_model": "pytorch/examples, word_language_model",
    "nanogpt": "nanoGPT, train.py",
    "nlp_example": "Accelerate, nlp_example.py",
}
KILLS = 2
BEGIN, END = "<!-- table, by python benchmarks/moved.py -->", "<!-- end of table -->"
HEADER = "| program | lines by hand | lines with zae | weights | after two kills |\n|---|---|---|---|---|"


def load(name: str) -> ModuleType:
    """Return a program as a module."""
    spec = importlib.util.spec_from_file_location(f"moved_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_by_hand(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the loop by hand leaves."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        return dict(load(name).by_hand().state_dict())


def train_with_zae(name: str, folder: Path, kills: int = 0) -> tuple[dict[str, torch.Tensor], int]:
    """Return the weights that the program with zae leaves in a process of its own, and how often it was killed."""
    end, killed = folder / "end.pt", 0
    command = [sys.executable, str(FOLDER / f"{name}.py"), str(folder / "run"), str(end)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while not end.exists():
        before = {*(folder / "run").glob("step-*")}
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        if killed < kills:
            while process.poll() is None and {*(folder / "run").glob("step-*")} <= before:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        killed += process.returncode == -signal.SIGKILL
        if process.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{name}: {said}")
    return torch.load(end), killed


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether all tensors are, to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def lines_of(name: str) -> tuple[int, int]:
    """Return the lines of code of the loop by hand, and of the class and the function with zae."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    parts = {node.name: node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    task = next(node for node in parts.values() if isinstance(node, ast.ClassDef) and is_task(node))
    code = code_lines(source)
    by_hand, with_zae, of_task = (
        len([line for line in code if node.lineno <= line <= (node.end_lineno or 0)])
        for node in (parts["by_hand"], parts["with_zae"], task)
    )
    return by_hand, with_zae + of_task


def is_task(node: ast.ClassDef) -> bool:
    """Return whether a class derives from Trainer."""
    return any(isinstance(base, ast.Name) and base.id == "Trainer" for base in node.bases)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines with code."""
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {number for token in tokens if token.type not in no_code
            for number in range(token.start[0], token.end[0] + 1)}  # fmt: skip


def row(name: str) -> str:
    """Run a program three times, and return its row of the table."""
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, each) for each in ("hand", "zae", "killed")]
        for folder in folders:
            folder.mkdir()
        by_hand = train_by_hand(name, folders[0])
        with_zae, _ = train_with_zae(name, folders[1])
        resumed, killed = train_with_zae(name, folders[2], KILLS)
    if killed != KILLS:
        raise RuntimeError(f"{name} had ended before it was killed {KILLS} times")
    hand, ours = lines_of(name)
    words = ("equal" if are_equal(by_hand, other) else "not equal" for other in (with_zae, resumed))
    return f"| [{PROGRAMS[name]}](../../examples/moved/{name}.py) | {hand} | {ours} | {' | '.join(words)} |"


def main() -> None:
    torch.set_num_threads(1)
    table = "\n".join([HEADER, *map(row, PROGRAMS)])
    print(table)
    PAGE.write_text(replace_between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table), encoding="utf-8")


if __name__ == "__main__":
    main()
