"""The blocks of README.md and of docs/*.md, evaluated as a reader would: each after the first one of its page."""

from __future__ import annotations

import configparser
import contextlib
import importlib
import inspect
import io
import json
import re
import shlex
import shutil
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from sybil import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

import zae.cli
from zae import Trainer
from zae.compose.introspect import hooks_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ONE_PROGRAM = "<!-- one program: each block continues the one before -->"
LANGUAGES = ("python", "pycon", "bash", "text", "dockerfile")
_PYTHON = re.compile(r"^(?P<mark> *<!-- not run: .+ -->\n+)?^ *```python\n(?P<code>.*?)^ *```$", re.M | re.S)
FIRST = re.search(r"```python\n(.*?)```", README, re.S)[1]


def list_pages() -> list[Path]:
    """Return the pages of docs/ and its folders that are written by hand."""
    return sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in ("_build", "generated"))


def find_page(name: str) -> Path:
    """Return the page with this name, whichever folder of docs/ it is in."""
    (found,) = [path for path in list_pages() if path.stem == name]
    return found


def read_setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def paste(text: str) -> str:
    """Return the python blocks of a page below each other, without those that a comment says are not run."""
    found = [block for block in _PYTHON.finditer(text) if not block["mark"]]
    return "\n".join(textwrap.dedent(block["code"]) for block in found)


class Blocks:
    """Evaluates every fenced block of a page, and remembers what was printed, and what was not run and why."""

    def __init__(self, path: Path):
        """Prepare to evaluate the blocks of a page, each after the first one."""
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.document = Document.parse(str(path), *self.parsers())
        self.script = types.ModuleType(f"blocks_of_{path.stem}")  # A class is found by its name, as in a script.
        self.document.namespace = vars(self.script)
        self.first: dict[str, object] = {}
        self.names: dict[str, object] = {}  # Those of all blocks.
        self.printed = ""
        self.evaluated: list[str] = []
        self.not_run: list[str] = []

    def parsers(self):
        return [CodeBlockParser(name, self.noted(name)) for name in LANGUAGES]

    def noted(self, language):
        """Return an evaluator that leaves out what the line before the block says is not run."""

        def evaluate(example):
            self.evaluated.append(language)
            line = example.document.text[: example.start].rstrip().rpartition("\n")[2]
            reason = re.fullmatch(r"\s*<!-- not run: (.*\w.*) -->", line)
            if reason:
                self.not_run.append(reason[1])
            else:
                getattr(self, f"run_{language}")(example)

        return evaluate

    def run(self):
        """Evaluate all blocks in the present folder."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, self.script.__name__, self.script)
            for example in self.document:
                example.evaluate()
        self.names |= self.document.namespace
        return self

    def forget(self, example):
        """Leave only the names of the first block in the namespace, unless the page is one program."""
        self.names |= example.namespace
        if self.first and ONE_PROGRAM not in self.text:
            example.namespace.clear()
            example.namespace.update(self.first)

    def run_python(self, example):
        self.forget(example)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            PythonEvaluator()(example)
        self.printed = out.getvalue()
        self.first = self.first or dict(example.namespace)

    def run_pycon(self, example):
        """Each statement that an error follows raises exactly this one."""
        self.forget(example)
        statements: list[tuple[str, str]] = []  # The code, and the error that stands under it.
        for line in example.parsed.strip().splitlines():
            code, error = statements.pop() if statements and not line.startswith(">>> ") else ("", "")
            is_code = line.startswith((">>> ", "... "))
            statements.append((code + line[4:] + "\n", error) if is_code else (code, line))
        for code, error in statements:
            with pytest.raises(zae.ZaeError) if error else contextlib.nullcontext() as caught:
                exec(code, example.namespace)
            assert not error or hide_folder(f"{type(caught.value).__name__}: {caught.value}") == error
        assert any(error for _, error in statements)

    def run_bash(self, example):
        """Our commands are run; of others, the program, files, extras and options must exist."""
        for line in re.sub(r"\\\n\s*", "", example.parsed.strip()).splitlines():
            for command in line.split(" && "):
                words = shlex.split(command, comments=True)
                if words[:3] == ["python", "-m", "zae"]:
                    expected = re.search(r"# exit status (\d)", line)
                    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as out:
                        status = zae.cli.main(words[3:])
                    out.seek(0)
                    self.printed = out.read()
                    assert status == int(expected[1] if expected else 0), (line, self.printed)
                elif words:
                    check_command(words)

    def run_dockerfile(self, example):
        """Its instructions are known, and its command is a list, so that signals reach the process."""
        instructions = read_dockerfile(example.parsed)
        assert instructions[0][0] == "FROM"
        assert {name for name, _ in instructions} <= set(INSTRUCTIONS)
        (command,) = [json.loads(rest) for name, rest in instructions if name == "CMD"]
        assert all(isinstance(word, str) for word in command)

    def run_text(self, example):
        """A drawing of the loop, a table of metrics, or what the block before has printed, but for its numbers."""
        if example.parsed.startswith("run("):
            check_loop(example.parsed)
        elif example.parsed.startswith("epoch "):
            check_table(example.parsed, str(example.namespace["metrics"]))
        else:
            assert shape(example.parsed) == shape(hide_folder(self.printed))


def hide_folder(text):
    """Write the present folder as /home/me, as the pages do."""
    return text.replace(str(Path.cwd()), "/home/me")


INSTRUCTIONS = ("FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "STOPSIGNAL", "CMD")


def read_dockerfile(text):
    """Return the instructions of a Dockerfile and the rest of their lines; a line may go on after a backslash."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip() and not line.startswith("#")]


def shape(printed):
    """Return the words of a text without its numbers and hashes."""
    return re.sub(r"\b(?:[0-9a-f]{8}){1,2}\b|[\d.,e+-]+", " ", printed).split()


def check_command(words):
    program, *rest = words
    if program == "torchrun":
        assert shutil.which("torchrun", path=Path(sys.executable).parent)
        known = torch.distributed.run.get_args_parser().format_help().replace("_", "-")
        assert [option for option in rest if option.startswith("--") and option not in known] == []
        return
    assert program == "python"
    if rest[:3] == ["-m", "pip", "install"]:
        assert rest[3:5] == ["-c", "constraints.txt"]
        assert (ROOT / "constraints.txt").exists()
        extra = re.fullmatch(r"\.\[(\w+)\]", rest[6])
        assert extra
        assert extra[1] in read_setup()["options.extras_require"]
    elif rest[0] == "-m":
        importlib.import_module(rest[1])
    else:
        assert (ROOT / rest[0]).is_file()


def check_table(quoted, printed):
    """The lines of a quoted table are lines of what was printed, up to what another machine rounds differently."""
    header, *rows = quoted.splitlines()
    found = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert header.split() == found["epoch"]
    for row in rows:
        *cells, mark = row.split() if row.endswith("best") else [*row.split(), ""]
        for name, cell, ours in zip(header.split(), cells, found[cells[0]], strict=False):
            limit = 0.02 if "accuracy" in name else 0 if name in ("epoch", "step", "lr") else 0.3 * float(cell)
            assert float(ours) == pytest.approx(float(cell), abs=limit), (name, row)
        assert mark in ("", "best")


def check_loop(pseudo_code):
    """The verbs of the pseudo-code, in its order, are those of a real run with one step."""
    calls: list[str] = []

    class Task(Trainer):
        def train_step(self, batch):
            calls.append("train_step")
            return {"loss": self.model(batch).square().mean()}

        def test_step(self, batch):
            calls.append("test_step")
            return {"loss": 0.0}

    verbs = re.findall(r"\b([a-z_]+)\(", pseudo_code)
    for name in {*verbs, *hooks_of(Task)} - {"train_step", "test_step"}:
        original = inspect.getattr_static(Trainer, name)
        if callable(original):
            setattr(Task, name, traced(name, original, calls))
    model = torch.nn.Linear(2, 1)
    Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).run(
        1, [torch.ones(4, 2)], [torch.ones(4, 2)]
    )
    # batches(wrap_loader(loader)) reads outside in, and is called inside out.
    expected = re.findall(
        r"\b([a-z_]+)\(", pseudo_code.replace("batches(wrap_loader(loader))", "wrap_loader() batches()")
    )
    rest = iter(calls)
    missing = [verb for verb in expected if verb not in rest]
    assert missing == [], f"not called in this order: {missing}; the run was {calls}"
    quiet = {"launch", "wrap_model", "build_optimizer", "build_scheduler", "batch_context", "epoch_context"}
    quiet |= {"evaluation_context", "steps_per_epoch", "gather", "count_targets", "sample_weight", "step_one", "log"}
    quiet |= {"evaluation_batches", "materialize", "wrap_optimizers"}  # For engines.
    quiet |= {"describe"}  # For the record of what the run was given.
    assert set(calls) - set(expected) - quiet == set(), sorted(set(calls) - set(expected) - quiet)


def traced(name, original, calls):
    def method(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    method.__replaces__ = True
    return method


def table_rows(text, heading):
    """The rows of the table that begins with a heading, as lists of cells."""
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
