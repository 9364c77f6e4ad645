"""The README: every block of it runs, and what it claims of options, order, output and errors is looked up (X-4)."""

from __future__ import annotations

import ast
import configparser
import contextlib
import inspect
import io
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from sybil import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

import zae
import zae.addons
from zae import AddOnBase, Trainer
from zae.composition.metaclass import options_of, seams_of

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


class Blocks:
    """Evaluates every fenced block, each as if it was pasted after the first, and remembers what was printed."""

    def __init__(self):
        self.first: dict[str, object] = {}  # The names that the first block leaves behind.
        self.names: dict[str, object] = {}  # Those of all blocks.
        self.printed = ""
        self.evaluated: list[str] = []

    def parsers(self):
        return [CodeBlockParser(name, getattr(self, name)) for name in ("python", "pycon", "bash", "text")]

    def forget(self, example):
        """Leave only the names of the first block in the namespace."""
        self.names |= example.namespace
        if self.first:
            example.namespace.clear()
            example.namespace.update(self.first)

    def python(self, example):
        self.evaluated.append("python")
        self.forget(example)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            PythonEvaluator()(example)
        self.printed = out.getvalue()
        self.first = self.first or dict(example.namespace)

    def pycon(self, example):
        """Each statement that an error follows raises exactly this one."""
        self.evaluated.append("pycon")
        self.forget(example)
        statements: list[tuple[str, str]] = []  # The code, and the error that stands under it.
        for line in example.parsed.strip().splitlines():
            code, error = statements.pop() if statements and not line.startswith(">>> ") else ("", "")
            is_code = line.startswith((">>> ", "... "))
            statements.append((code + line[4:] + "\n", error) if is_code else (code, line))
        for code, error in statements:
            with pytest.raises(zae.ZaeError) if error else contextlib.nullcontext() as caught:
                exec(code, example.namespace)
            assert not error or f"{type(caught.value).__name__}: {caught.value}" == error
        assert sum(bool(error) for _, error in statements) >= 5

    def bash(self, example):
        """A command's program exists, and so do the files, extras and options that it names; it is not run."""
        self.evaluated.append("bash")
        for line in example.parsed.strip().splitlines():
            for command in line.split(" && "):
                check_command(shlex.split(command))

    def text(self, example):
        self.evaluated.append("text")
        if example.parsed.startswith("run("):
            check_loop(example.parsed)
        else:
            check_table(example.parsed, str(example.namespace["metrics"]))
            assert f"It prints {float(self.printed.split()[-1]):.3f}."[:-2] in TEXT  # The last digit may differ.


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
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        assert extra
        assert extra[1] in setup["options.extras_require"]
    elif rest[0] == "-m":
        __import__(rest[1])
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
    """P-51: the verbs of the pseudo-code, in its order, are those of a real run with one step."""
    calls: list[str] = []

    class Task(Trainer):
        def train_step(self, batch):
            calls.append("train_step")
            return {"loss": self.model(batch).square().mean()}

        def test_step(self, batch):
            calls.append("test_step")
            return {"loss": 0.0}

    verbs = re.findall(r"\b([a-z_]+)\(", pseudo_code)
    for name in {*verbs, *seams_of(Task)} - {"train_step", "test_step"}:
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
    quiet |= {"evaluation_context", "steps_in", "gather", "sample_weight", "step_one", "log"}
    quiet |= {"evaluation_batches", "gather_data", "layout", "materialize", "wrap_optimizers"}  # For engines.
    assert set(calls) - set(expected) <= quiet


def traced(name, original, calls):
    def method(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    method.__replaces__ = True
    return method


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """The README, evaluated from its top to its end in an empty folder."""
    folder = tmp_path_factory.mktemp("readme")
    blocks = Blocks()
    document = Document.parse(str(README), *blocks.parsers())
    script = types.ModuleType("readme")  # Classes are found by their names, as in a script: they pickle.
    document.namespace = script.__dict__
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setitem(sys.modules, "readme", script)
        began = time.process_time()
        for example in document:
            example.evaluate()
    blocks.seconds = time.process_time() - began  # Of work: other processes on the machine do not count.
    blocks.files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    blocks.namespace = blocks.names | document.namespace
    return blocks


def test_every_block_of_the_readme_runs(blocks):
    """X-4: every block runs after the first alone, none is of an unknown language, all take less than a minute."""
    fences = re.findall(r"^```(\w+)$", TEXT, re.M)
    assert blocks.evaluated == fences
    assert TEXT.count("```") == 2 * len(fences)
    assert blocks.evaluated.count("python") >= 8
    assert blocks.seconds < 60
    assert {path.split("/")[0] for path in blocks.files} == {"runs"}
    assert "runs/logged/log.jsonl" in blocks.files
    assert any(path.startswith("runs/logged/tensorboard/events.out.tfevents") for path in blocks.files)


def first_block():
    return re.search(r"```python\n(.*?)```", TEXT, re.S)[1]


def test_first_block_trains_real_data_in_eleven_lines():
    """X-3: at most 11 non-blank lines beyond the data, and at most 4 names that are ours."""
    data, training = first_block().split("# The data is ready. Now train on it:\n")
    assert "zae" not in data
    assert "optim" not in data
    lines = [line for line in training.splitlines() if line.strip()]
    assert len(lines) <= 11
    words = {node.id for node in ast.walk(ast.parse(training)) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(ast.parse(training)) if isinstance(node, ast.Attribute)}
    words |= {node.name for node in ast.walk(ast.parse(training)) if isinstance(node, (ast.FunctionDef, ast.alias))}
    # Two variables of the script and a method of its model are called so.
    ours = words & ({*dir(Trainer), *zae.__all__} - {"model", "metrics", "parameters"})
    assert ours == {"Trainer", "train_step", "test_step", "run"}


def test_first_block_copied_into_a_file(tmp_path):
    """X-3, X-5, X-7: at least 0.95 within 20 s; piped, it writes plain lines, nothing to stderr, and no file."""
    (tmp_path / "first.py").write_text(first_block())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    assert [byte for byte in done.stdout if byte < 32 and byte != 10] == []
    accuracy = re.fullmatch(r"test accuracy: (0\.\d+)\n", done.stdout.decode())
    assert accuracy
    assert float(accuracy[1]) >= 0.95
    assert [path.name for path in tmp_path.iterdir()] == ["first.py"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20  # On one core, imports and all.


def table_rows(heading):
    """The rows of the table that begins with a heading, as lists of cells."""
    lines = TEXT[TEXT.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_of_add_ons_agrees_with_the_classes():
    """Every add-on has a row; its options, layer, slot, state and extra are what the class and setup.cfg say."""
    plain = set(options_of(Trainer))
    of_loggers = {"logger_required", "logger_fallback", "logger_timeout"}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = table_rows("| add-on | what it does |")
    all_add_ons = {name: getattr(zae.addons, name) for name in zae.addons.__all__}
    bases = {
        base for add_on in all_add_ons.values() for base in add_on.__mro__[1:]
    }  # Not to be mixed in by themselves.
    assert [row[0].strip("`") for row in rows] == sorted(
        name for name, each in all_add_ons.items() if each not in bases
    )
    for name, does, options, layer, slot, saves, extra in rows:
        add_on = getattr(zae.addons, name.strip("`"))
        own = set(options_of(Trainer.add_on(add_on))) - plain
        assert set(re.findall(r"`(\w+)`", options)) == own - of_loggers, name
        assert (own & of_loggers == of_loggers) == ("Logger" in name), name
        assert layer == add_on.layer, name
        assert slot == (add_on.slot or "-"), name
        saving = [c for c in add_on.__mro__ if c is not AddOnBase and getattr(c, "_is_addon", False)
                  and ("state_dict" in c.__dict__ or c.__dict__.get("state_attributes"))]  # fmt: skip
        assert saves == ("yes" if saving else "no"), name
        assert extra == "-" or extra.strip("`") in setup["options.extras_require"], name
        assert len(does.split()) <= 6, name
        assert not add_on.requires, name


def test_sentences_that_quote_the_code(blocks):
    """What stands in the running text: the line of explain(), the layers, the files and the public names."""
    explained = str(blocks.namespace["Task"].explain())
    beside = re.search(r"next to `unscale\(\)` it prints `([^`]+)`", TEXT)[1]
    assert re.search(rf"^ +unscale\(\) +# {re.escape(beside)}\.$", explained, re.M)
    assert " < ".join(zae.addon.LAYERS) in TEXT
    for path in re.findall(r"`((?:examples|zae)/\w+\.py|\.ci/run|constraints\.txt)`", TEXT):
        assert (ROOT / path).is_file(), path
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    known = {
        *zae.__all__,
        *zae.addons.__all__,
        *re.findall(r"^(\w+) =", setup["options.entry_points"]["zae.addons"], re.M),
    }
    assert set(re.findall(r"`(\w+(?:Addon|Error|Base|Dict))`", TEXT)) <= known


def test_required_packages_are_those_of_the_comparison():
    """X-1: setup.cfg requires four packages, and the README says so."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = [re.match(r"\w+", line)[0] for line in setup["options"]["install_requires"].split()]
    row = next(row for row in table_rows("| | zae | Lightning") if row[0] == "required packages")
    assert row[1] == str(len(required))
    sentence = re.search(r"zae itself needs (.*?)\.\s", TEXT, re.S)[1]
    assert [name for name in required if name not in sentence] == []


def test_commands_are_the_agreed_ones_and_the_readme_is_short():
    """The two commands that set everything up, word for word; a README that is read in one sitting."""
    for extra, then in (("examples", "python examples/digits.py"), ("test", "python -m pytest")):
        assert f'\npython -m pip install -c constraints.txt -e ".[{extra}]" && {then}\n' in TEXT
    lines = TEXT.splitlines()
    assert len(lines) <= 370
    assert [line for line in lines if len(line) > 120 and line[0] != "|" and "Error: " not in line] == []


def test_a_metric_that_is_not_there_is_named_with_those_that_are(blocks):
    """E16: the history and the checkpoints asked for a metric that nothing returned."""
    digits, train = blocks.namespace["Digits"], blocks.namespace["train"]

    class NoLoss(digits):
        def test_step(self, batch):
            return {"accuracy": 0.5}

    model = torch.nn.Linear(64, 10)
    trainer = NoLoss.add_on(zae.addons.StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path="runs/x"
    )
    metrics = trainer.run(1, train, train)
    for ask, found in (
        (lambda: metrics["accuracy"], r"no 'accuracy'; available: best_valid, .*\['valid_metrics_history'\]\[-1\]"),
        (lambda: metrics["best_valid"]["loss"], "available: none: "),
        (trainer.restore_best, "no validation returned monitor='loss'; give run.. a valid_loader, and monitor="),
    ):
        with pytest.raises(zae.ZaeError, match=found):
            ask()
    assert metrics["valid_metrics_history"][-1]["accuracy"] == 0.5
