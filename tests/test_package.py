"""The package as a whole: what it imports, what it promises, and that every example in it runs."""

from __future__ import annotations

import configparser
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import zae
import zae.addons
from kit.imports import OPTIONAL
from zae import Trainer

ROOT = Path(zae.__file__).resolve().parent.parent
CORE = sorted((ROOT / "zae").rglob("*.py"))
ADDONS = sorted((ROOT / "addons").rglob("*.py"))
ADAPTERS = [path for path in CORE if path.name in ("search.py", "torchmetrics_values.py")]
KIT = sorted((ROOT / "zae" / "testing").glob("*.py"))
ADD_ONS = [
    "AMPAddon",
    "EMAAddon",
    "EarlyStoppingAddon",
    "GradientAccumulationAddon",
    "MultiGPUAddon",
    "StateManagerAddon",
]

METHODS = [
    "run",
    "run_epoch",
    "run_batch",
    "evaluate",
    "inference",
    "predict",
    "ready",
    "toggle",
    "unwrap",
    "save_model",
    "apply_weights",
    "metrics",
    "log_reset",
    "score_of",
    "add_on",
    "explain",
    "train_step",
    "test_step",
    "predict_step",
    "is_main",
]


def modules():
    """Every module of the package, by its import name."""
    names = [m.name for m in pkgutil.walk_packages(zae.__path__, "zae.") if not m.name.startswith("zae.addons")]
    names += [f"zae.testing.{path.stem}" for path in KIT if path.stem != "__init__"]
    names += [m.name for m in pkgutil.iter_modules(zae.addons.__path__, "zae.addons.")]
    return ["zae", "zae.addons", *sorted(n for n in set(names) if not n.endswith("__main__"))]


# ------------------------------------------------------------------------------------------------------ promises


def test_an_absent_public_name():
    """Dir() has the public names, and another one is an error as usual."""
    assert set(dir(zae)) >= set(zae.__all__)
    assert all(issubclass(getattr(zae.addons, name), zae.AddOnBase) for name in zae.addons.__all__)
    with pytest.raises(AttributeError, match="module 'zae' has no attribute 'Trianer'"):
        zae.Trianer  # noqa: B018


def test_every_module_says_what_it_is_and_what_is_public():
    for name in modules():
        module = importlib.import_module(name)
        assert (module.__doc__ or "").strip().splitlines()[0].strip(), name
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.__all__ has {public!r}"


def documented():
    for name in ("zae", "zae.addons"):
        module = importlib.import_module(name)
        yield from ((public, getattr(module, public)) for public in module.__all__ if not public.startswith("__"))
    yield from ((f"Trainer.{name}", getattr(Trainer, name)) for name in METHODS if name != "explain")


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in documented()])
def test_every_public_name_is_documented(name, value):
    """A whole sentence; a class that is used, and not only raised, has an example that runs."""
    text = inspect.getdoc(value) or ""
    assert text.split("\n\n")[0].rstrip().endswith((".", ":")), name
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if (inspect.isclass(value) or name in ("hook", "repeats", "replaces")) and not is_error:
        assert "Examples\n--------\n>>> " in text, name
    if inspect.isfunction(value):
        described = re.findall(r"^(\*?\w+(?:, \w+)*) : ", text, re.MULTILINE)
        own = [p for p in inspect.signature(value).parameters if p not in ("self", "cls", "args", "kwargs")]
        if "Parameters\n---" in text:
            assert set(own) <= {n.lstrip("*") for group in described for n in group.split(", ")}, name


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_the_docstrings_run(name):
    """No example in the documentation is only prose."""
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} fail"


# ------------------------------------------------------------------------------------------------------- imports


@pytest.mark.exhaustive
def test_optional_packages_are_not_imported():
    """Importing everything and running leaves them alone; a logger loads its client in a run only."""
    code = f"""
import sys, torch, zae, zae.addons
from zae.addons import AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon
class Task(zae.Trainer):
    def train_step(self, batch):
        return {{"loss": self.model(batch).square().mean()}}
    test_step = train_step
from zae.addons import JSONLLoggerAddon, NeptuneLoggerAddon, TensorBoardLoggerAddon, WandBLoggerAddon
several = (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon, JSONLLoggerAddon)
for add_ons in ((), several):
    model = torch.nn.Linear(2, 1)
    options = {{"save_path": "runs", "jsonl_path": "run.jsonl"}} if add_ons else {{}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, **options)
    trainer.run(1, [torch.ones(4, 2)] * 2, [torch.ones(4, 2)])
    trainer.evaluate([torch.ones(4, 2)])
logs = {{"wandb": {{"mode": "offline"}}, "neptune": {{"mode": "offline"}}}}
Logged = Task.add_on(NeptuneLoggerAddon, TensorBoardLoggerAddon, WandBLoggerAddon)
Logged(model, "cpu", optimizer=optimizer, web_logger=logs, log_dir="events")
sys.stdout.write(" ".join(name for name in {OPTIONAL!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["run.jsonl", "runs"]


# ------------------------------------------------------------------------------------------------------- metadata


def test_the_metadata():
    """Four packages are required and no more, none with an upper bound; the rest are extras."""
    found = metadata.distribution("zae")  # Of the installed package, or of the checkout beside it.
    required = found.requires
    unconditional = [line for line in required if "extra ==" not in line]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in unconditional) == ["numpy", "safetensors", "torch", "tqdm"]
    assert not any(re.search(r"<|==|~=", line) for line in unconditional)
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert found.metadata["Version"] == zae.__version__


def test_extras_hold_only_what_is_used():
    """Each package of a user's extra is imported by an add-on or an adapter, or in a recipe.

    `all` holds all but the ended service, what is built, and Ray, which is large.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {name: packages.split() for name, packages in setup["options.extras_require"].items()}
    own = set(extras) - {"all", "examples", "bench", "test", "cluster", "fits", "vision", "dev", "docs"}
    recipes = ROOT / "docs" / "engines" / "launching.md"  # submitit and ray, which are used as they are.
    texts = "".join(path.read_text() for path in (*ADDONS, *ADAPTERS, recipes))
    for extra in own:
        packages = [re.match(r"\w+", line)[0] for line in extras[extra]]
        assert [
            name
            for name in packages
            if not re.search(rf'^ +(import|from) {name}\b|^import {name}\b|"{name}[".]', texts, re.M)
        ] == []
    assert extras["all"] == [f"zae[{','.join(sorted(own - {'deepspeed', 'neptune', 'ray'}))}]"]


@pytest.mark.exhaustive
def test_a_failed_import_keeps_its_cause():
    """A name that torch has lost is named, with the module that wanted it; the import works where it is there again."""
    code = """
import importlib, torch
for owner, lost, package, name in (
    ("torch", "complex64", "zae", "Trainer"),
    ("torch", "float16", "zae.addons", "AMPAddon"),
):
    owner, package = importlib.import_module(owner), importlib.import_module(package)
    kept = getattr(owner, lost)
    delattr(owner, lost)
    try:
        exec(f"from {package.__name__} import {name}")
    except ImportError as error:
        print(f"{error} | {type(error.__cause__).__name__}")
    setattr(owner, lost, kept)
    exec(f"from {package.__name__} import {name}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 2), done.stderr
    for line, where in zip(lines, ("'Trainer': zae.trainer", "'AMPAddon': zae.addons.amp"), strict=True):
        expected = rf"cannot import {where} failed with AttributeError: module 'torch.* has no attribute '\w+'"
        assert re.fullmatch(rf"{expected} \| AttributeError", line)


def test_the_package_is_typed_and_its_add_ons_are_listed():
    assert (Path(zae.__file__).parent / "py.typed").is_file()
    assert (Path(zae.addons.__file__).parent / "py.typed").is_file()
    listed = {point.name for point in metadata.entry_points(group="zae.addons")}
    assert listed >= set(ADD_ONS)
    assert all(point.value.endswith(f":{point.name}") for point in metadata.entry_points(group="zae.addons"))


@pytest.mark.parametrize(
    ("statement", "meant"),
    [
        ("from zae.addons import EmaAddon", "from zae.addons import EMAAddon"),
        ("from zae.addons import StateManager", "from zae.addons import StateManagerAddon"),
        ("from zae.addons import EarlyStoping", "from zae.addons import EarlyStoppingAddon"),
        ("from zae import EMAAddon", "from zae.addons import EMAAddon"),
        ("from zae import AmpAddon", "from zae.addons import AMPAddon"),
    ],
)
def test_a_name_that_is_nearly_one_names_the_line_to_write(statement, meant):
    with pytest.raises(ImportError, match=f"cannot import name .*; write: {meant}$"):
        exec(statement, {})


def test_other_names_are_missing_as_in_any_module():
    """A submodule is found, whose name is nearly that of its class."""
    exec("from zae.addons import accelerate, amp, ema, profiler\nfrom zae import trainer", {})
    for name in ("zae", "zae.addons"):
        module = importlib.import_module(name)
        assert not hasattr(module, "__wrapped__")
        assert not hasattr(module, "NothingLikeIt")
