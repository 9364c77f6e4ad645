"""A stored checkpoint of each present format: python tests/kit/frozen.py writes them.

Each is one zip in tests/golden/checkpoints: a checkpoint in the middle of the second epoch, and in ``end.json`` how far
the uninterrupted run came. Before the first release they are written anew when the format changes.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # When it is run as a script.

from kit import hand, table
from zae import Trainer
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    StateManagerAddon,
)

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "checkpoints"
EPOCHS = 3
_SAVING = {"save_every": 1, "keep_last": 99, "keep_best": 0, "overwrite": True, "resume": "auto"}


class Case(NamedTuple):
    """A trainer, its loaders, and where its checkpoint is taken."""

    build: Callable[[Path], tuple[Trainer, Any, Any]]
    step: int
    """In the second epoch of six batches; with accumulation in a later one."""
    ranks: int = 1


def _together(folder: Path) -> tuple[Trainer, Any, Any]:
    """Eight add-ons at once."""
    model, optimizer = table.parts()
    cls = table.Task.add_on(
        StateManagerAddon, AMPAddon, GradientAccumulationAddon, EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon,
        LedgerAddon,
    )  # fmt: skip
    trainer = cls(
        model, "cpu", optimizer=optimizer, log_bar=False, seed=5, precision="bf16", gradient_accumulation_steps=2,
        decay=0.75, patience=5, jsonl_path=folder / "log.jsonl", ledger_path=folder / "ledger.jsonl",
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3), save_path=folder / "save", **_SAVING,
    )  # fmt: skip
    return trainer, hand.loader(), hand.loader(size=8, seed=4, shuffle=False)


def _plain(folder: Path) -> tuple[Trainer, Any, Any]:
    """One add-on that saves, weights as torch.save writes them."""
    model = hand.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = table.Task.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=optimizer,
        log_bar=False,
        seed=5,
        save_path=folder / "save",
        save_format="ckpt",
        **_SAVING,
    )
    return trainer, hand.loader(), hand.loader(size=8, seed=4, shuffle=False)


class _Logging(table.Task):
    """Records more rows in an epoch than state.json holds."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        for row in range(150):
            self.log({"row": row / 4}, self.progress_checker.step)


def _rows(folder: Path) -> tuple[Trainer, Any, Any]:
    """A history that is long enough for files of its own."""
    model, optimizer = table.parts()
    trainer = _Logging.add_on(StateManagerAddon)(
        model, "cpu", optimizer=optimizer, log_bar=False, seed=5, save_path=folder / "save", **_SAVING
    )
    return trainer, hand.loader(), hand.loader(size=8, seed=4, shuffle=False)


def _two_shards(folder: Path) -> tuple[Trainer, Any, Any]:
    """Two ranks that each save their parts."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = table.Task.add_on(StateManagerAddon, FSDPAddon, EMAAddon)(
        model, ["cpu", "cpu"], optimizer=optimizer, log_bar=False, seed=5, decay=0.75, save_path=folder / "save",
        save_format="sharded", **_SAVING,
    )  # fmt: skip
    return trainer, hand.loader(batch_size=2), hand.loader(size=8, seed=4, shuffle=False)


CASES: dict[str, Case] = {
    "together": Case(_together, step=5),
    "ckpt": Case(_plain, step=8),
    "rows": Case(_rows, step=8),
    "two-shards": Case(_two_shards, step=8, ranks=2),
}


def end_of(trainer: Any) -> dict[str, Any]:
    """Return how far a run has come and what it has recorded, without the figures, which depend on the processor."""
    rows = trainer.metrics["train_metrics_history"] + trainer.metrics["valid_metrics_history"]
    history = [[row["epoch"], row["step"], *row] for row in rows]
    return {"progress": trainer.progress_checker.state_dict(), "history": history}


def freeze(name: str) -> Path:
    """Run a case to its end, and zip its checkpoint and how far it came."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # A slow logger writes beside the script.
        random.seed(0)
        trainer, loader, valid = case.build(Path(place))
        trainer.run(EPOCHS, loader, valid)
        found = next(path for path in Path(place, "save").iterdir() if path.name == f"step-{case.step:08d}")
        target = FOLDER / f"{name}.zip"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(found.iterdir()):
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
            archive.writestr(zipfile.ZipInfo("end.json"), json.dumps(end_of(trainer)), zipfile.ZIP_DEFLATED)
    return target


def unpack(name: str, folder: Path) -> dict[str, Any]:
    """Put a frozen checkpoint where its case saves, and return how far its run came."""
    target = folder / "save" / f"step-{CASES[name].step:08d}"
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
        archive.extractall(target)
    end: dict[str, Any] = json.loads((target / "end.json").read_text())
    (target / "end.json").unlink()
    return end


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:] or CASES:
        print(f"{freeze(each).stat().st_size:7d} {each}", flush=True)
