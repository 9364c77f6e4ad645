"""Checkpoints of many compositions that an earlier zae has saved: python tests/kit/frozen.py writes them.

Each is one zip in tests/golden/compositions: a checkpoint in the middle of the second epoch, and in ``end.json`` what
the uninterrupted run came to. They are written once for each release that changes what a state holds.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

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
    MultiGPUAddon,
    PEFTAddon,
    StateManagerAddon,
)

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "compositions"
EPOCHS = 3
_STEP = 8  # In the second epoch of six batches; with accumulation in a later one.
_SAVING = {"save_every": 1, "keep_last": 99, "keep_best": 0, "overwrite": True, "resume": "auto"}


class Case(NamedTuple):
    """A trainer, its loaders, and where its checkpoint is taken."""

    build: Callable[[Path], tuple[Trainer, Any, Any]]
    step: int = _STEP
    ranks: int = 1


class Stream(IterableDataset[Any]):
    """Samples in their order, which only iterating over them gives."""

    def __iter__(self) -> Iterator[Any]:
        return iter(hand.data())


class GanTask(Trainer):
    """Two losses for two optimizers."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model.losses(batch)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": sum(self.model.losses(batch).values())}


def _table(*names: str) -> Case:
    """The add-ons of these names, as they bite in the table, and one that saves."""
    entries = [next(e for e in table.TABLE if e.id == name) for name in names]

    def build(folder: Path) -> tuple[Trainer, Any, Any]:
        model, optimizer = table.parts()
        options: dict[str, Any] = {}
        for entry in entries:
            options |= entry.biting(folder)
        cls = table.Task.add_on(StateManagerAddon, *(entry.add_on for entry in entries))
        options |= {**_SAVING, "save_path": folder / "save"}
        made = cls(model, "cpu", optimizer=optimizer, log_bar=False, gradient_clip=0.5, seed=5, **options)
        return made, hand.loader(), hand.loader(size=8, seed=4, shuffle=False)

    return Case(build, step=3 if any("Accumulation" in name for name in names) else _STEP)


def _plain(loader: Callable[[], Any] = hand.loader, scheduler: Any = None, **options: Any) -> Case:
    """One add-on that saves; another loader, optimizer or schedule."""

    def build(folder: Path) -> tuple[Trainer, Any, Any]:
        model = hand.network()
        optimizer = options.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.02)
        rest = {key: value for key, value in options.items() if key != "optimizer"} | _SAVING
        trainer = table.Task.add_on(StateManagerAddon)(
            model, "cpu", optimizer=optimizer, scheduler=scheduler and scheduler(optimizer), log_bar=False, seed=5,
            save_path=folder / "save", **rest,
        )  # fmt: skip
        return trainer, loader(), hand.loader(size=8, seed=4, shuffle=False)

    return Case(build)


def _gan(folder: Path) -> tuple[Trainer, Any, Any]:
    gan = hand.Gan()
    optimizers = gan.optimizers()
    schedulers = {name: torch.optim.lr_scheduler.StepLR(each, 4) for name, each in optimizers.items()}
    cls = GanTask.add_on(StateManagerAddon, EMAAddon)
    trainer = cls(
        gan, "cpu", optimizer=optimizers, scheduler=schedulers, scheduler_step_on_batch=True, log_bar=False, seed=5,
        decay=0.75, save_path=folder / "save", **_SAVING,
    )  # fmt: skip
    return trainer, [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)], None


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


def _two_ranks(folder: Path, engine: Any = MultiGPUAddon, **options: Any) -> tuple[Trainer, Any, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    cls = table.Task.add_on(StateManagerAddon, engine, EMAAddon)
    trainer = cls(
        model, ["cpu", "cpu"], optimizer=optimizer, log_bar=False, seed=5, decay=0.75, save_path=folder / "save",
        **_SAVING, **options,
    )  # fmt: skip
    return trainer, hand.loader(batch_size=2), hand.loader(size=8, seed=4, shuffle=False)


def _lora(folder: Path) -> tuple[Trainer, Any, Any]:
    """An adapter, a layer that is trained as a whole, and statistics of BatchNorm, on a frozen model."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["4"])
    trainer = table.Task.add_on(StateManagerAddon, EMAAddon, PEFTAddon)(
        hand.network, "cpu", optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), log_bar=False, seed=5, decay=0.75,
        peft_config=config, save_path=folder / "save", **_SAVING,
    )  # fmt: skip
    return trainer, hand.loader(), hand.loader(size=8, seed=4, shuffle=False)


def _stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(hand.data(), batch_size=4, shuffle=True)


def _weighted() -> Any:
    sampler = WeightedRandomSampler([1.0] * 22, 22, generator=torch.Generator().manual_seed(9))
    return hand.loader(sampler=sampler)


def _batches() -> list[Any]:
    return list(hand.loader(shuffle=False))


_LR = torch.optim.lr_scheduler
CASES: dict[str, Case] = {
    **{e.id: _table(e.id) for e in table.TABLE if e.add_on is not StateManagerAddon and not e.packages},
    **{e.id: _table(e.id) for e in table.TABLE if e.packages in (("tensorboard",), ("torchmetrics",))},
    "alone": _plain(),
    "together": Case(_together, step=5),
    "two-ranks": Case(_two_ranks, ranks=2),
    "two-shards": Case(partial(_two_ranks, engine=FSDPAddon, save_format="sharded"), ranks=2),
    "gan": Case(_gan),
    "lora": Case(_lora),
    "ckpt": _plain(save_format="ckpt"),
    "stateful-loader": _plain(_stateful),
    "own-sampler": _plain(_weighted),
    "generator": _plain(lambda: hand.loader(generator=torch.Generator().manual_seed(3))),
    "workers": _plain(lambda: hand.loader(num_workers=1)),
    "stream": _plain(lambda: DataLoader(Stream(), batch_size=4)),
    "list-of-batches": _plain(_batches),
    "slow-path": _plain(fast_data=False),
    "sgd": _plain(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True)),
    "adagrad": _plain(optimizer=torch.optim.Adagrad),
    "plateau": _plain(scheduler=lambda o: _LR.ReduceLROnPlateau(o, patience=0)),
    "one-cycle": _plain(scheduler=lambda o: _LR.OneCycleLR(o, 0.1, total_steps=18), scheduler_step_on_batch=True),
    "cosine": _plain(scheduler=lambda o: _LR.CosineAnnealingLR(o, 3)),
    "sequence": _plain(scheduler=lambda o: _LR.SequentialLR(o, [_LR.LinearLR(o), _LR.StepLR(o, 1)], [1])),
}


def end_of(trainer: Any) -> dict[str, Any]:
    """What a run has come to, as plain numbers."""
    weights = {name: value.double().flatten().tolist() for name, value in trainer.model_state().items()}
    history = [dict(row) for row in trainer.metrics["train_metrics_history"] + trainer.metrics["valid_metrics_history"]]
    return {"weights": weights, "history": history, "progress": trainer.progress_checker.state_dict()}


def freeze(name: str) -> Path:
    """Run a case to its end, and zip its checkpoint and what came of it."""
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
    """Put a frozen checkpoint where its case saves, and return what its run came to."""
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
