"""Every engine with every feature, as kit/engine_table.py lists them: as in one process, or refused with the remedy.

The default run has a cell of each kind of check; others have the marker `exhaustive`, or `deepspeed` for DeepSpeed.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.engine_table import FEATURES, TABLE, Cell, Row, refusal
from kit.engines import ENGINES, Engine, build, data, distance, net, sgd, weights
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.addons.deepspeed.zero import load_library

SAMPLE = {  # One of each kind of check; the features of one engine are in each engine's own tests too.
    ("pipeline", "clip"), ("pipeline", "sharded state"), ("accelerate", "AMP"), ("accelerate", "other ranks"),
    ("accelerate", "validation"),
}  # fmt: skip
CELLS = [(name, feature) for name, row in TABLE.items() for feature in FEATURES if not row.cells[feature].is_refused]


def marked(cell: tuple[str, str]) -> Any:
    marks = () if cell in SAMPLE else getattr(pytest.mark, TABLE[cell[0]].marker)
    return pytest.param(*cell, marks=marks, id="-".join(cell))


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the calls of DeepSpeed that have another name in the newest torch, and what the compiler reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def make(row: Row, cell: Cell, engine: Engine | None, *add_ons: Any, **options: Any) -> Any:
    own = {} if engine is None else cell.own
    optimizer = sgd if cell.bound is not None else row.optimizer
    kind = torch.float32 if cell.bound is not None else row.kind
    given = {"model": net(kind), "optimizer": optimizer, **cell.options, **own, **options}
    return build(engine, *cell.add_ons, *add_ons, **given)


def trains(row: Row, cell: Cell, folder: Path) -> None:
    """Train as one process does, four steps in windows that are whole; what the feature leaves is the same too."""
    os.chdir(folder)
    trainer = make(row, cell, row.engine)
    expected = {"ledger_path": f"one-{dist.get_rank()}.jsonl"} if "ledger_path" in cell.options else {}
    single = make(row, cell, None, **expected)
    rows, valid = 32 * row.engine.shares, data(4 * row.engine.shares + 1, 2, False)
    if "compile_backend" in cell.options or "compile_blocks" in cell.own:
        rows, valid = 16 * row.engine.shares, data(4 * row.engine.shares, 4, False)  # Else it compiles for each size.
    here, there = trainer.run(1, data(rows), valid), single.run(1, data(rows, 4 * row.engine.shares), valid)
    assert here["step"] == there["step"] >= 4
    bound = row.bound if cell.bound is None else cell.bound
    assert distance(trainer, single) < bound
    loss, other = (each["valid_metrics_history"][-1]["loss"] for each in (here, there))
    assert loss == pytest.approx(other, rel=max(1e-10, 10 * bound))
    if cell.options.get("gradient_clip"):
        assert abs(float(trainer.grad_norm) - float(single.grad_norm)) < bound
        assert float(single.grad_norm) > cell.options["gradient_clip"]
    if "decay" in cell.options:
        average, others = (each.state_dict()["EMAAddon"]["average"] for each in (trainer, single))
        for name, value in others.items():
            assert name.endswith("key.bias") or float((average[name] - value).abs().max()) < bound
    if "ledger_path" in cell.options:
        trainer.barrier()
        sizes = [Path(f"ledger-{rank}.jsonl").stat().st_size for rank in range(row.engine.world)]
        assert min(sizes) > 1000
    assert dist.get_world_size() == trainer.world_size == row.engine.world


def validates(row: Row, cell: Cell, folder: Path) -> None:
    """Evaluate each sample once, in shares that are not equal."""
    trainer, single = make(row, cell, row.engine), make(row, cell, None)
    trainer.run(1, data(8 * row.engine.shares))
    single.run(1, data(8 * row.engine.shares, 4 * row.engine.shares))
    for rows, size in ((9, 2), (1, 1)):
        valid = data(rows, size, False)
        assert trainer.evaluate(valid) == pytest.approx(single.evaluate(valid), rel=max(1e-10, 10 * row.bound))
        assert trainer.predict(valid)["rows"].tolist() == single.predict(valid)["rows"].tolist()


def saving(row: Row, cell: Cell, folder: Path, name: str, **options: Any) -> Any:
    own = {"save_path": folder / name, "save_every": 2, "gradient_clip": 0.05, **options}
    return make(row, cell, row.engine, StateManagerAddon, **own)


def resumes(row: Row, cell: Cell, folder: Path, **options: Any) -> None:
    """Save in the middle of an epoch, and go on to bitwise the end of the run that nothing has stopped."""
    loader = lambda: data(16 * row.engine.shares)  # noqa: E731
    end = saving(row, cell, folder, "end", **options)
    end.run(2, loader())
    saving(row, cell, folder, "begun", **options).run(2, loader(), max_steps=6)
    again = saving(row, cell, folder, "again", resume=str(folder / "begun"), **options)
    again.run(2, loader())
    assert again.progress_checker.step == end.progress_checker.step == 8
    ends = [weights(each) for each in (end, again)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def resumes_sharded(row: Row, cell: Cell, folder: Path) -> None:
    resumes(row, cell, folder, save_format="sharded")
    files = {each.name for path in (folder / "begun").iterdir() if path.is_dir() for each in path.iterdir()}
    assert ("shard-00000.safetensors" in files) == (cell.text == "yes")


def saves(row: Row, cell: Cell, folder: Path) -> None:
    saving(row, cell, folder, "begun").run(2, data(16, 16 // row.engine.shares, False), max_steps=1)


def on_rank(name: str, feature: str, folder: Path) -> None:
    row = TABLE[name]
    check = {"validation": validates, "state": resumes, "sharded state": resumes_sharded, "other ranks": saves}
    with quiet():
        check.get(feature, trains)(row, row.cells[feature], folder)


@pytest.mark.sample(count=5)
@pytest.mark.parametrize(("name", "feature"), [marked(cell) for cell in CELLS])
def test_a_cell(name: str, feature: str, tmp_path: Path, crews: Any) -> None:
    row = TABLE[name]
    if row.marker == "deepspeed":  # Imported here, once, and not in each of the ranks, which are forks.
        load_library(torch.device("cpu"))
    crews(row.engine.world).call(on_rank, name, feature, tmp_path)
    if feature == "other ranks":  # Which one process reads.
        options = {"model": net(row.kind), "optimizer": row.optimizer, "gradient_clip": 0.05}
        trainer = build(Engine((MultiGPUAddon,)), StateManagerAddon, save_path=tmp_path / "one", save_every=2,
                        resume=str(tmp_path / "begun"), reshard=True, **options)  # fmt: skip
        trainer.run(2, data(16, 16, False))
        single = build(None, **options)
        single.run(2, data(16, 16, False))
        assert trainer.progress_checker.step == 2
        assert distance(trainer, single) < row.bound


@pytest.mark.parametrize("name", TABLE)
def test_what_a_row_refuses_names_the_remedy(name: str) -> None:
    """Before a rank is started; the text says what to write, or which engine to take."""
    row = TABLE[name]
    assert tuple(row.cells) == FEATURES
    for feature, cell in row.cells.items():
        if cell.is_refused:
            assert re.search(r"\b(leave|write|train with)\b", refusal(row, cell)), feature


def test_every_engine_is_in_the_table() -> None:
    held = {engine.add_ons for engine in ENGINES.values()}
    assert held <= {row.engine.add_ons for row in TABLE.values()}
