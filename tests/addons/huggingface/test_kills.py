"""Runs with HuggingFaceAddon, callbacks and PEFTAddon, killed at drawn places, in one process and on two ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from kit import hf
from kit.faults import Disk, installed
from kit.ranks import each_rank
from zae import AddOnBase, Trainer
from zae.addons import (
    CallbackAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    HuggingFaceAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    PEFTAddon,
    StateManagerAddon,
)
from zae.checkpoint import filesystem

pytestmark = pytest.mark.exhaustive

KILLS = 6


class Places(Disk):
    """Counts the operations on the disk and the batches of a rank, and kills it at one of them."""

    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__()
        self.kill_at, self.count = kill_at, 0

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        self.pass_one()

    def pass_one(self) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


class PlacesAddon(AddOnBase):
    """Count each batch, of training and of evaluations, as a place."""

    layer = "observe"

    def batches(self, loader: Any) -> Iterator[Any]:
        for batch in super().batches(loader):
            filesystem.disk.pass_one()  # type: ignore[attr-defined]
            yield batch


ADD_ONS = (HuggingFaceAddon, CallbackAddon, GradientAccumulationAddon, EMAAddon, StateManagerAddon, JSONLLoggerAddon,
           PlacesAddon)  # fmt: skip


def train(folder: Path, *add_ons: type, **options: Any) -> None:
    """Train 8 epochs with dropout, evaluations and an own callback's state; continue what the folder holds."""
    model = hf.make_model("causal")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    settings = {
        "train_dataset": hf.dataset("causal"), "eval_dataset": hf.dataset("causal", 6), "eval_strategy": "epoch",
        "per_device_train_batch_size": 4, "num_train_epochs": 8, "optim": "adamw_torch", "warmup_steps": 4,
        "lr_scheduler_type": "cosine", "train_sampling_strategy": "random", "gradient_accumulation_steps": 2,
        "decay": 0.9, "callbacks": [transformers.EarlyStoppingCallback(early_stopping_patience=100)],
        "monitor": "valid/loss", "seed": 5, "log_bar": False, **options,
    }  # fmt: skip
    saving = {"save_path": folder, "save_every": 1, "save_weights_every": 3, "resume": "auto"}
    paths = {**saving, "jsonl_path": folder.with_suffix(".jsonl")}
    trainer = Trainer.add_on(*ADD_ONS, *add_ons)(model, "cpu", **settings, **paths)
    assert trainer.mode == "train"
    trainer.train()
    assert trainer.world_size == (dist.get_world_size() if dist.is_initialized() else 1)


def adapted(folder: Path, *add_ons: type) -> None:
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # By peft itself.
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.2, fan_in_fan_out=True)
    train(folder, PEFTAddon, *add_ons, peft_config=lora)


def on_ranks(
    folder: Path, engine: type | None, kind: Callable[..., None], victim: int = 0, kill_at: int | None = None
) -> list[int]:
    """Train in processes of their own, one of which is killed at a place; return how many places each rank has."""
    world = 1 if engine is None else 2

    def rank() -> int:
        assert dist.get_world_size() == world
        with installed(Places(kill_at if dist.get_rank() == victim else None)) as places:
            kind(folder, *(() if engine is None else (engine,)))
        return places.count

    return each_rank(world, rank)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the log without the rows that each call of ``run`` begins and ends with, and without durations."""
    rows = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "time" not in name and "_s" not in name} for row in rows
            if "run" not in row]  # fmt: skip


@pytest.mark.parametrize("kind", [train, adapted])
@pytest.mark.parametrize("engine", [None, MultiGPUAddon, FSDPAddon], ids=["one", "ddp", "fsdp"])
def test_it_ends_the_same(kind: Callable[..., None], engine: type | None, tmp_path: Path) -> None:
    """The newest checkpoint, the files of weights and the log are those of the run that nothing has disturbed."""
    counts = on_ranks(tmp_path / "whole", engine, kind)
    draw = random.Random(f"{kind.__name__} {engine}")
    for _ in range(KILLS):  # At most a seventh of the places in each life: none comes to the end.
        victim = draw.randrange(len(counts))
        with pytest.raises(AssertionError, match=f"rank {victim} of {len(counts)}: ended with -9"):
            on_ranks(tmp_path / "killed", engine, kind, victim, draw.randrange(counts[victim] // (KILLS + 1)))
    on_ranks(tmp_path / "killed", engine, kind)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    names = [sorted(path.name for path in folder.glob("weights-*")) for folder in (whole, killed)]
    assert names[0]
    assert names[0] == names[1]
    for name in names[0]:
        one, two = load_file(whole / name), load_file(killed / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[key]) for key, value in one.items()), name
    assert records(whole) == records(killed)
