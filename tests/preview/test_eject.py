"""`eject`: the script of a composition has nothing of zae, and leaves bitwise the same weights."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit import hand
from kit.ranks import each_rank
from zae.cli import main
from zae.errors import ConfigError
from zae.preview.eject.carry import carry

HEAD = '''
"""Classify points."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import zae
from zae import AddOnBase, Every, Trainer
from zae.addons import *

WIDTH = 8  # Of the hidden layer.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.25))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Noisy(Dataset):
    """Points that are moved a little, from NumPy's stream."""

    def __init__(self, size):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x + 0.1 * torch.from_numpy(np.random.randn(4)).float(), int(x.sum() > 0)


class Task(Trainer):
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    def test_step(self, batch):
        return self.train_step(batch)

'''

MAKER = """
def make_trainer():
    np.random.seed(3)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.{optimizer}
    loader = DataLoader(Noisy(22), batch_size=4, shuffle=True)
    valid_loader = DataLoader(Noisy(9), batch_size=4, shuffle=True)
    trainer = {cls}(
        model, "cpu", optimizer=optimizer, log_bar=False,
        {options}
    )
    return trainer, {{{run}}}


if __name__ == "__main__":
    trainer, run = make_trainer()
    print(trainer.run(**run))
"""

RUN = '"n_epoch": 3, "loader": loader, "valid_loader": valid_loader'
ADAM = "AdamW(model.parameters(), lr=0.02)"


def script(
    add_ons: str = "",
    options: str = "",
    run: str = RUN,
    optimizer: str = ADAM,
    more: str = "",
    maker: str = MAKER,
    task: str = "Task",
) -> str:
    """The script of a user: ``make_trainer`` with these add-ons and options."""
    cls = f"{task}.add_on({add_ons})" if add_ons else task
    head = HEAD.strip("\n") + "\n" + textwrap.dedent(more)
    names = sorted({part.strip() for part in add_ons.split(",") if part.strip().endswith("Addon")} - {"NoiseAddon"})
    taken = f"from zae.addons import {', '.join(names)}\n" if names else ""
    head = head.replace("from zae.addons import *\n", taken)
    return head + maker.format(cls=cls, options=options, run=run, optimizer=optimizer)


SUM = '''

class Counting(Task):
    """A loss that counts its targets."""

    def train_step(self, batch):
        x, y = batch
        keep = y == y  # All of them.
        loss = nn.functional.cross_entropy(self.model(x)[keep], y[keep])
        return {"loss": loss, "num_targets": int(keep.sum())}

    def test_step(self, batch):
        return self.train_step(batch)["loss"]

'''

GAN = '''

class TwoLosses(Trainer):
    """Two losses."""

    def train_step(self, batch):
        x, y = batch
        hidden = self.model.body(x)
        loss = nn.functional.cross_entropy(self.model.head(hidden), y)
        return {"loss": {"body": loss + hidden.square().mean(), "head": loss}}

    def test_step(self, batch):
        return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

'''

TWO = (
    '{"body": torch.optim.Adam(self.model.body.parameters(), lr=0.02), '
    '"head": torch.optim.RMSprop(self.model.head.parameters(), lr=0.01)}'
).replace("self.", "")

NOISE = """

class NoiseAddon(AddOnBase):
    "Add noise to each gradient."
    layer = "loop"

    def __init__(self, *args, noise=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.noise = noise

    def unscale(self):
        super().unscale()
        for parameter in self.model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=self.noise)

    def eject_lines(self, script):
        super().eject_lines(script)
        add = f"parameter.grad.add_(torch.randn_like(parameter), alpha={self.noise})"
        script.add("before_clip", "for parameter in model.parameters():", f"    {add}")

"""

FACTORIES = MAKER.replace("    model = Net()\n    optimizer = torch.optim.{optimizer}\n", "").replace(
    'model, "cpu", optimizer=optimizer,', 'lambda: Net(), "cpu", optimizer=lambda p: torch.optim.{optimizer}, seed=7,'
)

ODD = '''
"""A script of another style."""
from __future__ import annotations

import typing

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import zae
import zae.addons as A
from zae.addons import EMAAddon as Average

if typing.TYPE_CHECKING:
    from zae import MetricsDict

ADD_ONS = (Average, A.GradientAccumulationAddon)
OPTIONS = {"decay": 0.5, "gradient_accumulation_steps": 2, "log_bar": False}


@torch.no_grad()
def weigh(x):
    """Return weights."""  # Of no use.
    return x.abs().mean()


class Task(zae.Trainer):
    scale: float = 1.0  # A class attribute.

    @property
    def half(self):
        return self.scale / 2

    def train_step(self, batch) -> dict[str, typing.Any]:
        from zae.errors import ZaeError

        x = batch["x"].to(self.device)
        if self.mode != "train":
            raise ValueError("é: not in training")
        loss = self.half * nn.functional.mse_loss(self.model(x), x) + 0 * weigh(x)
        return dict(loss=loss)

    def test_step(self, batch):
        return self.model(batch["x"]).square().mean()


def make_trainer(width: int = 4):
    torch.manual_seed(0)
    cls = Task.add_on(*ADD_ONS)
    data = [{"x": torch.randn(width, generator=torch.Generator().manual_seed(i))} for i in range(10)]
    loader = DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))
    trainer = cls(lambda: nn.Linear(width, width), "cpu", optimizer=[torch.optim.Adam], gradient_clip=float("inf"),
                  **OPTIONS)
    arguments = dict(n_epoch=None, loader=loader, valid_loader=loader, max_steps=7)
    return trainer, arguments
'''

CASES = {
    "plain": script(),
    "another style": ODD.strip("\n"),
    "without validation": script(run='"n_epoch": 2, "loader": loader', options="seed=4,"),
    "clip": script(options="gradient_clip=0.1, seed=5, on_nonfinite='skip',"),
    "clip, warn": script(options="gradient_clip=0.1, seed=5, on_nonfinite='warn',"),
    "accumulation": script("GradientAccumulationAddon", "gradient_accumulation_steps=4, gradient_clip=0.5,"),
    "targets": script("GradientAccumulationAddon", "gradient_accumulation_steps=4,", more=SUM, task="Counting"),
    "bf16": script("AMPAddon", "precision='bf16', seed=1,"),
    "weights in bf16": script(
        "AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon",
        "dtype='bf16', gradient_clip=0.5, decay=0.5, gradient_accumulation_steps=2, save_path='runs', resume='auto', "
        "scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),",
    ),
    "weights in bf16, factories": script(
        "AMPAddon", "dtype='bf16', on_nonfinite='skip',", maker=FACTORIES, optimizer="AdamW(p, lr=0.02)"
    ),
    "weights in bf16, rounded": script("AMPAddon", "dtype='bf16', master_weights=False,"),
    "checkpointing": script(
        "GradientCheckpointingAddon", 'checkpoint_modules=["body.0", "body.3", "head"], checkpoint_keep="matmuls",'
    ),
    "fp16": script("AMPAddon, EMAAddon", "precision='fp16', loss_scale=(2.0**23, 1.0), gradient_clip=0.5, decay=0.5,"),
    "fp16, accumulation": script(
        "AMPAddon, GradientAccumulationAddon",
        "precision='fp16', loss_scale=(2.0**22, 1.0), gradient_accumulation_steps=2, on_nonfinite='skip',",
    ),
    "average": script("EMAAddon", "decay=0.75, monitor='accuracy',"),
    "average from an epoch on": script("EMAAddon", "decay=0.75, average_start=1,"),
    "uniform average": script("EMAAddon", "averaging='uniform', average_start=1,"),
    "early stopping": script(
        "EarlyStoppingAddon",
        "patience=1, delta=0.05, monitor='accuracy',",
        RUN.replace("3", "30"),
        optimizer="SGD(model.parameters(), lr=1e-3)",
    ),
    "early stopping by training": script(
        "EarlyStoppingAddon",
        "patience=2, min_epochs=4,",
        '"n_epoch": 30, "loader": loader',
        optimizer="SGD(model.parameters(), lr=1e-9)",
    ),
    "scheduler of epochs": script(options="scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),"),
    "scheduler of steps": script(
        options="scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=18), "
        "scheduler_step_on_batch=True,"
    ),
    "plateau": script(options="scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),"),
    "cosine": script(
        "GradientAccumulationAddon", "scheduler=zae.schedulers.cosine(warmup=0.3), gradient_accumulation_steps=2,"
    ),
    "factories": script(
        maker=FACTORIES, optimizer="AdamW(p, lr=0.02)", options="scheduler=zae.schedulers.wsd(warmup=2),"
    ),
    "steps": script(options="seed=2,", run='"n_epoch": None, "loader": loader, "max_steps": 9'),
    "validation by steps": script(
        options="scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),",
        run=f'{RUN}, "valid_every": Every(steps=4), "max_steps": 15',
    ),
    "validation in some epochs": script("EarlyStoppingAddon", "patience=1,", f'{RUN}, "valid_every": Every(epochs=2)'),
    "steps in an epoch": script(run=f'{RUN}, "steps_per_epoch": 3'),
    "several validations": script(
        options="scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),",
        run=RUN.replace('": valid_loader', '": {"a": valid_loader, "b": loader}'),
    ),
    "a sampler with epochs": script().replace(
        "loader = DataLoader(Noisy(22), batch_size=4, shuffle=True)",
        "sampler = torch.utils.data.DistributedSampler(Noisy(22), 1, 0)\n"
        "    loader = DataLoader(Noisy(22), batch_size=4, sampler=sampler)",
        1,
    ),
    "two optimizers": script("EMAAddon", "gradient_clip=0.5, decay=0.5,", more=GAN, task="TwoLosses").replace(
        f"torch.optim.{ADAM}", TWO
    ),
    "two optimizers, one loss": script(
        "GradientAccumulationAddon", "gradient_clip=0.5, gradient_accumulation_steps=2,", more=GAN, task="TwoLosses"
    )
    .replace(f"torch.optim.{ADAM}", TWO)
    .replace('{"body": loss + hidden.square().mean(), "head": loss}', "loss"),
    "two optimizers, fp16": script(
        "AMPAddon, GradientAccumulationAddon",
        "gradient_clip=0.5, precision='fp16', loss_scale=(2.0**22, 1.0), gradient_accumulation_steps=3,",
        more=GAN,
        task="TwoLosses",
    ).replace(f"torch.optim.{ADAM}", TWO),
    "its own add-on": script(
        "NoiseAddon, GradientAccumulationAddon", "noise=0.2, gradient_accumulation_steps=2, seed=1,", more=NOISE
    ),
    "all together": script(
        "StateManagerAddon, JSONLLoggerAddon, EMAAddon, AMPAddon, GradientAccumulationAddon, EarlyStoppingAddon",
        "save_path='runs', resume='auto', jsonl_path='log.jsonl', decay=0.75, precision='fp16', patience=2, seed=5, "
        "loss_scale=(2.0**22, 1.0), gradient_accumulation_steps=4, gradient_clip=0.5, "
        "scheduler=zae.schedulers.linear(warmup=2),",
    ),
}


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def eject(source: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """Write the script of a source by the command; return it and what the command said."""
    path = folder / "user_script.py"
    path.write_text(source, encoding="utf-8")
    with inside(folder / "here"):
        assert main(["eject", str(path), "-o", str(folder / "plain.py")]) == 0, capsys.readouterr().err
    return folder / "plain.py", capsys.readouterr().out


def train_both(folder: Path, n_epoch: int | None = None) -> tuple[Any, Any, Any]:
    """Train by zae and by the script, each in a folder of its own; return the trainer, its metrics and the model."""
    with inside(folder / "zae"):
        trainer, run = load(folder / "user_script.py", "user_script").make_trainer()
        metrics = trainer.run(**run)
    with inside(folder / "plain"):
        plain = load(folder / "plain.py", "plain_script")
        task, run = plain.make_trainer()
        plain.train(task, run.get("n_epoch"), run["loader"], run.get("valid_loader"))
    return trainer, metrics, task.model


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_the_composition(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bitwise, with BatchNorm, dropout, a short last batch, and noise of NumPy in the dataset."""
    path, said = eject(CASES[name], tmp_path, capsys)
    assert "weights differ" not in said
    text = path.read_text(encoding="utf-8")
    assert "zae" not in text.replace("written by zae", "")
    assert max(map(len, text.splitlines())) <= 140
    trainer, _, model = train_both(tmp_path)
    assert trainer.progress_checker.step > 3
    assert hand.digest(model) == hand.digest(trainer.unwrap())


def test_a_plain_trainer_is_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The functions that train are at most forty lines; all of it is run as a program, where zae cannot be imported."""
    path, said = eject(CASES["without validation"], tmp_path, capsys)
    text = path.read_text(encoding="utf-8")
    train = text.partition("def train(")[2].partition("\n\n\n")[0]
    assert len(train.splitlines()) <= 25
    assert said == f"{path}: {len(text.splitlines())} lines\n"
    (tmp_path / "zae.py").write_text("raise ImportError('zae is not here')")
    done = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    trainer, run = load(tmp_path / "user_script.py", "user_script").make_trainer()
    trainer.run(**run)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in trainer.unwrap().state_dict().items())


def test_a_class_in_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script contains both files, and needs neither."""
    source = CASES["early stopping"]
    head, _, maker = source.partition("def make_trainer")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_task.py").write_text(head, encoding="utf-8")
    imports = "import numpy as np\nimport torch\nfrom torch.utils.data import DataLoader\n"
    imports += "from own_task import Net, Noisy, Task\nfrom zae.addons import EarlyStoppingAddon\n\n\n"
    try:
        path, said = eject(f"{imports}def make_trainer{maker}", tmp_path, capsys)
        assert "own_task" not in path.read_text(encoding="utf-8")
        assert "differ" not in said
        trainer, _, model = train_both(tmp_path)
        assert hand.digest(model) == hand.digest(trainer.unwrap())
    finally:
        sys.modules.pop("own_task", None)


def test_the_method_writes_the_steps_and_the_loop(tmp_path: Path) -> None:
    """Without a function that makes the trainer, whoever calls the script gives its parts."""
    (tmp_path / "user_script.py").write_text(CASES["clip"] + "\n\nRESULT = torch.manual_seed(0)\n", encoding="utf-8")
    module = load(tmp_path / "user_script.py", "user_script")
    trainer, run = module.make_trainer()
    text = trainer.eject(run)
    assert "RESULT" not in text
    (tmp_path / "plain.py").write_text(text, encoding="utf-8")
    plain = load(tmp_path / "plain.py", "plain_script")
    _, other = module.make_trainer()
    torch.manual_seed(3)
    model = plain.Net()
    task = plain.Task(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.02))
    plain.train(task, other["n_epoch"], other["loader"], other["valid_loader"])
    trainer.run(**run)
    assert hand.digest(model) == hand.digest(trainer.unwrap())


@pytest.mark.parametrize("options", ["resume='auto'", "resume=True"])
def test_the_script_continues_from_its_last_epoch(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped after an epoch and started again, it comes to the weights of the run that was not; zae reads the log."""
    source = CASES["all together"].replace("resume='auto'", options).replace('"n_epoch": 3', '"n_epoch": 4')
    eject(source.replace("patience=2", "patience=9"), tmp_path, capsys)
    with inside(tmp_path / "whole"):
        plain = load(tmp_path / "plain.py", "plain_script")
        whole, run = plain.make_trainer()
        plain.train(whole, run["n_epoch"], run["loader"], run["valid_loader"])
    with inside(tmp_path / "parts"):
        for n_epoch in (1, 3, 4):
            task, run = plain.make_trainer()
            plain.train(task, n_epoch, run["loader"], run["valid_loader"])
        state = torch.load("runs/last.pt", weights_only=True)
        lines = Path("log.jsonl").read_text().splitlines()
    assert state["epoch"] == 4
    assert hand.digest(task.model) == hand.digest(whole.model)
    assert len(lines) == 8  # Training and validation of four epochs, each once.


class Killed(BaseException):
    """As a kill: nothing catches it."""


WITHIN = {
    "all together": CASES["all together"].replace("resume='auto'", "resume='auto', save_every=1"),
    "steps of batches": script(
        "StateManagerAddon, EMAAddon", "save_path='runs', resume='auto', save_every=2, decay=0.5,",
        run=RUN + ', "max_steps": 14, "valid_every": Every(steps=4)',
    ).replace("shuffle=True)\n    valid", "shuffle=True, generator=torch.Generator())\n    valid"),
    "weights in bf16": CASES["weights in bf16"].replace("resume='auto'", "resume='auto', save_every=1"),
    "several": script(
        "StateManagerAddon", "save_path='runs', resume='auto', save_every=1,", more=GAN, task="TwoLosses"
    ).replace(f"torch.optim.{ADAM}", TWO),
    "logged": script(
        "StateManagerAddon, JSONLLoggerAddon",
        "save_path='runs', resume='auto', save_every=1, jsonl_path='log.jsonl', log_every=4, gradient_clip=0.1,"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*list(WITHIN)[:1], *(pytest.param(n, marks=pytest.mark.exhaustive)
                                                         for n in list(WITHIN)[1:])])  # fmt: skip
def test_the_script_continues_within_an_epoch(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped at each save in turn and started again, it comes bitwise to the end of zae's run, with the same log."""
    eject(WITHIN[name], tmp_path, capsys)
    trainer, _, whole = train_both(tmp_path)
    assert hand.digest(trainer.unwrap()) == hand.digest(whole)
    plain = load(tmp_path / "plain.py", "plain_script")
    original, saves, used = plain.save, 0, set[int]()

    def save(state: Any, path: Any) -> None:
        nonlocal saves
        original(state, path)
        saves += 1
        used.add(state["used"])
        if saves % 2:
            raise Killed

    plain.save, starts = save, 0
    with inside(tmp_path / "parts"):
        while True:
            starts += 1
            task, run = plain.make_trainer()
            with contextlib.suppress(Killed):
                plain.train(task, run.get("n_epoch"), run["loader"], run["valid_loader"])
                break
        logged = Path("log.jsonl").read_text().splitlines() if Path("log.jsonl").exists() else []
    assert starts > 3
    assert len(used) > 2
    assert hand.digest(task.model) == hand.digest(whole)
    if logged:
        records = [[{k: v for k, v in json.loads(each).items() if k != "unix_time"} for each in lines]
                   for lines in (logged, (tmp_path / "plain" / "log.jsonl").read_text().splitlines())]  # fmt: skip
        assert [
            records[0][index] for index, each in enumerate(records[0]) if each not in records[0][:index]
        ] == records[1]


def test_float32_weights_of_several_optimizers_are_named_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = script("AMPAddon", "dtype='bf16',", more=GAN, task="TwoLosses").replace(f"torch.optim.{ADAM}", TWO)
    path, said = eject(source, tmp_path, capsys)
    assert "dtype='bf16' of AMPAddon, with several optimizers: the weights are in float32" in said
    assert "to_bfloat16" not in path.read_text(encoding="utf-8")


def test_records_are_those_of_the_logger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means, rates and gradient norms, at steps and at the ends of epochs."""
    for every in ("Every(steps=2)", "Every(epochs=1)"):
        folder = tmp_path / every
        folder.mkdir()
        options = f"jsonl_path='log.jsonl', gradient_clip=0.5, log_every={every}, seed=3,"
        eject(script("JSONLLoggerAddon", options), folder, capsys)
        train_both(folder)
        ours, plain = ([json.loads(line) for line in (folder / who / "log.jsonl").read_text().splitlines()]
                       for who in ("zae", "plain"))  # fmt: skip
        ours = [{key: each[key] for key in each if key not in ("batch", "unix_time")} for each in ours[1:]]
        plain = [{key: each[key] for key in each if key != "unix_time"} for each in plain]
        assert [each.keys() for each in plain] == [each.keys() for each in ours]
        for own, other in zip(plain, ours, strict=True):
            assert own == pytest.approx(other, rel=1e-12)


LEFT_OUT: dict[str, tuple[str, str]] = {
    "ranks that share batches of a list": (
        script("MultiGPUAddon", run='"n_epoch": 1, "loader": [*loader]'),
        "weights differ: MultiGPUAddon (with a loader that is not a DataLoader of batches)",
    ),
    "ranks, and parts of the model": (
        script("MultiGPUAddon", more=GAN, task="TwoLosses"),
        "weights differ: MultiGPUAddon (where a step uses self.model other than by calling it)",
    ),
    "ranks that count targets": (
        script("MultiGPUAddon", more=SUM, task="Counting"), "weights differ: MultiGPUAddon (with num_targets)"
    ),
    "ranks without samples": (
        script("MultiGPUAddon").replace('"cpu"', '["cpu", "cpu"]').replace("Noisy(22)", "Noisy(25)"),
        "weights differ: MultiGPUAddon (with a last step of fewer samples than ranks)",
    ),
    "ranks, and steps between saves": (
        script("MultiGPUAddon, StateManagerAddon", "save_path='runs', save_every=2,"),
        "weights differ: MultiGPUAddon (with save_every in steps)",
    ),
    "LedgerAddon": (script("LedgerAddon", "ledger_path='a.ledger',"), "left out: LedgerAddon ("),
    "PrefetchAddon": (script("PrefetchAddon"), "left out: PrefetchAddon"),
    "BatchNorm": (
        script("GradientCheckpointingAddon", 'checkpoint_modules=["body"],'),
        "left out: GradientCheckpointingAddon of modules with buffers",
    ),
    "StepInBackwardAddon": (script("StepInBackwardAddon"), "left out: StepInBackwardAddon"),
    "global_batch_size": (
        script("GradientAccumulationAddon", "global_batch_size=8,"), "weights differ: global_batch_size=8"
    ),
    "limit_batches": (script(run=f'{RUN}, "limit_batches": 2'), "weights differ: limit_batches=2 of run()"),
    "an add-on of one's own": (
        script("NoiseAddon", more=NOISE.partition("    def eject_lines")[0]),
        "weights differ: NoiseAddon (Add noise to each gradient)",
    ),
    "a seam": (
        script(more="\nclass Signs(Task):\n    def unscale(self):\n        super().unscale()\n\n", task="Signs"),
        "weights differ: Signs.unscale",
    ),
    "a name of zae": (
        script(more="\ndef helper():\n    return zae.__version__\n\n"), "weights differ: zae's zae in line "
    ),
    "an attribute of the trainer": (
        script(
            more="\nclass Paced(Task):\n    def train_step(self, batch):\n"
            "        scale = self.progress_checker.step + 1\n"
            "        return {'loss': super().train_step(batch)['loss'] * scale}\n\n", task="Paced",
        ),
        "weights differ: self.progress_checker, which Paced reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command and at the top of the script, with whether the weights differ."""
    source, words = LEFT_OUT[name]
    path, said = eject(source, tmp_path, capsys)
    assert words in said
    heading = " ".join(path.read_text(encoding="utf-8").partition('"""\n\nimport')[0].split())
    assert words.rpartition(": ")[2] in heading


def test_what_cannot_be_ejected_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that exists, and a class without one."""
    path, _ = eject(CASES["plain"], tmp_path, capsys)
    user = tmp_path / "user_script.py"
    assert main(["eject", str(user), "-o", str(path)]) == 2
    assert "plain.py exists; give another name, or --force" in capsys.readouterr().err
    assert main(["eject", str(user), "-o", str(path), "--force"]) == 0
    assert main(["eject", str(user)]) == 0
    assert path.read_text(encoding="utf-8") in capsys.readouterr().out.replace(str(path), "")
    base = load(user, "other_script").Task
    lost = type(base)("Lost", base.__bases__, {**vars(base), "__module__": "nowhere"})
    with pytest.raises(ConfigError, match="put the class into a file"):
        lost(torch.nn.Linear(1, 1), "cpu", mode="test").eject()


def test_an_add_on_that_is_passed_on_is_named():
    """It is left out of the script, and so the line that uses it fails there."""
    source = """
        from zae import AddOnBase, Trainer

        class Task(Trainer):
            pass

        class NoiseAddon(AddOnBase):
            pass

        def make(model, *add_ons):
            return Task.add_on(*add_ons)(model)

        def make_trainer(model):
            return make(model, NoiseAddon)
    """
    carried = carry(textwrap.dedent(source), {"Task"}, {"NoiseAddon"}, ())
    assert carried.left == [(14, "NoiseAddon", "")]
    assert carry(textwrap.dedent(source).replace(", NoiseAddon)", ")"), {"Task"}, {"NoiseAddon"}, ()).left == []


# ------------------------------------------------------------------------------------------------- on several ranks

CPUS = '"cpu", optimizer=optimizer', '["cpu", "cpu"], optimizer=optimizer'


def script_of_ranks(add_ons: str = "", options: str = "", run: str = RUN, size: int = 22, **more: Any) -> str:
    """The script of a user who trains on two ranks."""
    source = script(f"MultiGPUAddon{', ' * bool(add_ons)}{add_ons}", options, run, **more)
    return source.replace(*CPUS).replace("Noisy(22)", f"Noisy({size})")


ON_RANKS = {
    "clip": script_of_ranks(options="gradient_clip=0.1, seed=5,"),
    "unequal shares": script_of_ranks("EMAAddon", "gradient_clip=0.1, seed=5, decay=0.5,", size=21),
    "without a seed": script_of_ranks().replace('["cpu", "cpu"]', '"cpu"'),
    "accumulation": script_of_ranks(
        "GradientAccumulationAddon", "gradient_accumulation_steps=2, gradient_clip=0.5, seed=1,", size=30
    ),
    "fp16": script_of_ranks(
        "AMPAddon, EMAAddon, GradientAccumulationAddon",
        "precision='fp16', loss_scale=(2.0**23, 1.0), decay=0.5, seed=1, gradient_accumulation_steps=2, "
        "on_nonfinite='skip',",
        size=21,
    ),
    "weights in bf16": script_of_ranks(
        "AMPAddon, GradientAccumulationAddon", "dtype='bf16', gradient_accumulation_steps=2, seed=1,", size=21
    ),
    "plateau": script_of_ranks(
        "EarlyStoppingAddon",
        "patience=2, delta=0.05, seed=2, "
        "scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),",
        f'{RUN}, "valid_every": Every(steps=2)'.replace("3", "9"),
    ),
    "steps": script_of_ranks(
        options="seed=2, scheduler=zae.schedulers.cosine(warmup=0.3),",
        run=f'{RUN}, "max_steps": 7, "steps_per_epoch": 2',
    ),
    "several validations, drop_last": script_of_ranks(
        options="seed=2,", run=RUN.replace('": valid_loader', '": {"a": valid_loader, "b": loader}')
    ).replace("shuffle=True)\n    valid", "shuffle=True, drop_last=True)\n    valid"),
    "workers": script_of_ranks(options="seed=2,").replace("batch_size=4,", "batch_size=4, num_workers=1,", 1),
    "generator": script_of_ranks(options="seed=2,").replace(
        "batch_size=4,", "batch_size=4, generator=torch.Generator(),", 1
    ),
    "its own shares": script_of_ranks(options="seed=2,").replace(
        "loader = DataLoader(Noisy(22), batch_size=4, shuffle=True)",
        "import os\n    sampler = torch.utils.data.DistributedSampler(Noisy(22), 2, int(os.environ.get('RANK', 0)))\n"
        "    loader = DataLoader(Noisy(22), batch_size=4, sampler=sampler)",
        1,
    ),
    "all together": script_of_ranks(
        "StateManagerAddon, JSONLLoggerAddon, EMAAddon, GradientAccumulationAddon, EarlyStoppingAddon",
        "save_path='runs', resume='auto', jsonl_path='log.jsonl', decay=0.75, patience=2, seed=5, "
        "gradient_accumulation_steps=2, gradient_clip=0.5, log_every=2,",
    ),
}  # fmt: skip


def ends_of_both(folder: Path) -> tuple[int, str, str]:
    """Train by zae and by the script on this rank; return the steps and the weights of both."""
    trainer, _, model = train_both(folder)
    return trainer.progress_checker.step, hand.digest(trainer.unwrap()), hand.digest(model)


@pytest.mark.parametrize("name", [*list(ON_RANKS)[:1], *(pytest.param(n, marks=pytest.mark.exhaustive)
                                                         for n in list(ON_RANKS)[1:])])  # fmt: skip
def test_the_weights_of_two_ranks_are_those_of_the_composition(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bitwise, on both ranks, with BatchNorm, dropout, a short last step, and noise of NumPy in the dataset."""
    path, said = eject(ON_RANKS[name], tmp_path, capsys)
    assert "weights differ" not in said
    text = path.read_text(encoding="utf-8")
    assert "zae" not in text.replace("written by zae", "")
    assert "DistributedDataParallel(model" in text
    ends = each_rank(2, ends_of_both, tmp_path)
    assert ends[0] == ends[1]
    step, ours, plain = ends[0]
    assert step > 3
    assert plain == ours


def parts_and_whole(folder: Path) -> tuple[str, str, int]:
    """Train by the script on this rank, whole, and stopped after epochs; return both weights and the records."""
    plain = load(folder / "plain.py", "plain_script")
    with inside(folder / "whole"):
        whole, run = plain.make_trainer()
        plain.train(whole, run["n_epoch"], run["loader"], run["valid_loader"])
    dist.barrier()
    with inside(folder / "parts"):
        for n_epoch in (1, 2, run["n_epoch"]):
            task, run = plain.make_trainer()
            plain.train(task, n_epoch, run["loader"], run["valid_loader"])
            dist.barrier()  # Rank 0 has saved.
        records = len(Path("log.jsonl").read_text().splitlines())
    return hand.digest(task.model), hand.digest(whole.model), records


def weights_of_both(folder: Path) -> list[list[float]]:
    """Train by zae and by the script on this rank; return the weights of both."""
    trainer, _, model = train_both(folder)
    both = trainer.unwrap(), model
    return [torch.cat([value.reshape(-1).double() for value in each.state_dict().values()]).tolist() for each in both]


@pytest.mark.exhaustive
def test_three_ranks_sum_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which rounds differently, and is named: the weights are equal up to rounding."""
    sgd = script_of_ranks(options="seed=3,", optimizer="SGD(model.parameters(), lr=0.1, momentum=0.9)", size=23)
    source = sgd.replace('["cpu", "cpu"]', '["cpu"] * 3').replace("model = Net()", "model = Net().double()")
    _, said = eject(source.replace(".float()", ".double()").replace("self.x[index]", "self.x[index].double()"),
                    tmp_path, capsys)  # fmt: skip
    assert "weights differ: the order in which the gradients of more than two ranks are summed" in said
    for ours, plain in each_rank(3, weights_of_both, tmp_path):
        assert plain == pytest.approx(ours, rel=1e-10, abs=1e-12)


@pytest.mark.exhaustive
def test_the_script_continues_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped after an epoch and started again, each rank draws on; one rank writes the log and the state."""
    eject(ON_RANKS["all together"].replace("patience=2", "patience=9"), tmp_path, capsys)
    (parts, whole, records), other = each_rank(2, parts_and_whole, tmp_path)
    assert parts == whole
    assert other == (parts, whole, records)
    assert records == 3 + 3  # After each second step of six, and after each epoch.


@pytest.mark.exhaustive
def test_records_of_two_ranks_are_those_of_the_logger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means over both ranks, each record once."""
    options = "jsonl_path='log.jsonl', gradient_clip=0.5, log_every=2, seed=3,"
    eject(script_of_ranks("JSONLLoggerAddon", options, size=21), tmp_path, capsys)
    each_rank(2, ends_of_both, tmp_path)
    ours, plain = ([json.loads(line) for line in (tmp_path / who / "log.jsonl").read_text().splitlines()]
                   for who in ("zae", "plain"))  # fmt: skip
    ours = [{key: each[key] for key in each if key not in ("batch", "unix_time")} for each in ours[1:]]
    plain = [{key: each[key] for key in each if key != "unix_time"} for each in plain]
    assert len(plain) == 4 + 3
    for own, other in zip(plain, ours, strict=True):
        assert own == pytest.approx(other, rel=1e-6)


@pytest.mark.exhaustive
def test_torchrun_leaves_the_weights_of_a_run_that_starts_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both as programs, the script where zae cannot be imported; without a seed, each rank draws its own numbers."""
    source = script_of_ranks("EMAAddon", "decay=0.5,", size=21)
    path, said = eject(source, tmp_path, capsys)
    assert said.splitlines()[1:] == [f"  start it with torchrun --nproc_per_node 2 {path}"]
    (tmp_path / "ours.py").write_text(f'{source}    torch.save(trainer.unwrap().state_dict(), "ours.pt")\n')
    started = ["ours.py"], ["-m", "torch.distributed.run", "--nproc_per_node", "2", "plain.py"]
    for arguments in started:
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        (tmp_path / "zae.py").write_text("raise ImportError('zae is not here')")
    ours, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("ours.pt", "model.pt"))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(plain[name], value) for name, value in ours.items())
