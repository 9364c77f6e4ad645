"""A rank that was given something else is refused before the first step, on all ranks, by its name and both values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zae.addons
from kit.engines import ENGINES, F64, Net, build, data, distance
from kit.ranks import each_rank
from zae import AddOnBase, DistributedError, Every, LoaderError
from zae.addons import (
    CallbackAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    ProfilerAddon,
    StateManagerAddon,
)
from zae.compose.options import option_values, options_of
from zae.record import parts
from zae.record.between_ranks import READ_BY

WORLD = 2
ONE_OF_EACH = ("ddp", "accelerate", "fsdp", "tensor", "pipeline")


def adam(lr: float = 1e-2, **options: Any) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **options)


def frozen() -> nn.Module:
    net = Net().to(F64)
    net.norm.requires_grad_(False)
    return net


def with_adapter() -> nn.Module:
    net = Net().to(F64)
    net.adapter = nn.Linear(2, 2, dtype=F64)
    return net


def decays(rate: float) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate**step)


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"optimizer": adam(0.1)}, r"optimizer 0: lr .* 0.01 on rank 0 and 0.1 on rank 1"),
    "weight decay": ({"optimizer": adam(weight_decay=0.5)}, r"0: weight_decay .* 0.01 on .* and 0.5 on rank 1"),
    "optimizer": ({"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, r"optimizer 0 .*'AdamW' on .* and 'SGD' on rank 1"),
    "clip": ({"gradient_clip": 1e-9}, r"gradient_clip .* 1.0 on rank 0 and 1e-09 on rank 1.* read in clip"),
    "average": ({"decay": 0.5}, r"decay .* 0.9 on rank 0 and 0.5 on rank 1"),
    "accumulation": ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps .* 1 on rank 0 and 2 on rank 1"),
    "nonfinite": ({"on_nonfinite": "skip"}, r"on_nonfinite .* 'raise' on rank 0 and 'skip' on rank 1"),
    "log_every": ({"log_every": Every(steps=2)}, r"log_every "),
    "schedule": ({"scheduler": decays(0.5)}, r"scheduler 0: lr_lambdas .* 0.9.* on rank 0 and .* 0.5.* on rank 1"),
    "frozen": ({"model": frozen}, r"parameter norm.weight .*requires_grad=True' on rank 0 and .*=False' on rank 1"),
    "dtype": ({"model": lambda: Net().float()}, r"embed.weight .*float64.* on rank 0 and .*float32.* on rank 1"),
    "adapter": ({"model": with_adapter}, r"parameter adapter.weight .* absent on rank 0 and 'torch.float64 \(2, 2\)"),
    "epochs": ({"n_epoch": 3}, r"n_epoch .* 2 on rank 0 and 3 on rank 1.* read in Run.has_more_epochs"),
    "steps": ({"max_steps": 3}, r"max_steps .* None on rank 0 and 3 on rank 1"),
    "validations": ({"valid_every": Every(steps=2)}, r"valid_every "),
    "no validation": ({"valid": None}, r"valid_loader .* True on rank 0 and False on rank 1"),
    "batch size": ({"batch_size": 3}, r"batch_size of loader .* 4 on rank 0 and 3 on rank 1"),
    "order": ({"shuffle": False}, r"sampler of loader .* 'RandomSampler' on rank 0 and 'SequentialSampler' on rank 1"),
    "fewer samples": ({"rows": 40}, r"len\(loader.dataset\) differs .* \(48 and 40\)"),
    "other samples": ({"flipped": True}, r"loader.dataset.tensors\[0\] differs between rank 0 and rank 1"),
}  # fmt: skip
"""What rank 1 has, and what is said of it."""


def flipped(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of other samples of the same number."""
    (tokens,) = loader.dataset.tensors  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(tokens.flip(0)), loader.batch_size, shuffle=True)


def train(engine: str, *add_ons: Any, **options: Any) -> Any:
    """Return a trainer of these ranks after two epochs, or the error."""
    run = {key: options.pop(key) for key in ("max_steps", "valid_every") if key in options}
    rows, size, shuffle = options.pop("rows", 48), options.pop("batch_size", 4), options.pop("shuffle", True)
    loader = data(rows, size, shuffle)
    if options.pop("flipped", False):
        loader = flipped(loader)
    n_epoch, valid = options.pop("n_epoch", 2), options.pop("valid", data(8, 4, shuffle=False))
    trainer = build(
        ENGINES[engine], EMAAddon, GradientAccumulationAddon, *add_ons,
        **{"gradient_clip": 1.0, "decay": 0.9, "timeout": 20.0, "scheduler": decays(0.9), **options},
    )  # fmt: skip
    trainer.run(n_epoch, loader, valid, **run)
    return trainer


def refused(engine: str, names: list[str]) -> list[tuple[str, str, float]]:
    """Return on each rank the errors of runs in which rank 1 was given something else, and how long they took."""
    found = []
    for name in names:
        began = time.monotonic()
        try:
            train(engine, **(OTHER[name][0] if dist.get_rank() == 1 else {}))
        except (DistributedError, LoaderError) as error:
            found.append((type(error).__name__, str(error), time.monotonic() - began))
        else:
            found.append(("", "it has trained", 0.0))
    return found


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("engine", ONE_OF_EACH)
def test_what_one_rank_was_given_is_refused_on_all_of_them(engine: str) -> None:
    names = [name for name in OTHER if engine != "pipeline" or name not in ("dtype", "adapter")]
    main, other = each_rank(WORLD, refused, engine, names)
    for name, (kind, text, seconds), (_, text_of_other, _) in zip(names, main, other, strict=True):
        assert re.search(OTHER[name][1], text), (name, text)
        assert text == text_of_other, name
        assert kind == ("LoaderError" if "samples" in name else "DistributedError"), name
        assert seconds < 15, f"{name}: not after the timeout"


class Quiet(AddOnBase):
    """Only shows something: it may be on one rank alone."""

    layer = "observe"


def watch(trainer: Any) -> None:
    """A callback of one rank."""


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_what_a_rank_shows_and_keeps_to_itself_may_differ(engine: str, tmp_path: Any) -> None:
    """A logger, a bar, a callback, a profiler, an add-on that watches, a seed and a folder: only rank 0 has them."""

    def rank() -> list[str]:
        is_main = dist.get_rank() == 0
        extra = (JSONLLoggerAddon, ProfilerAddon, Quiet, CallbackAddon) if is_main else (CallbackAddon,)
        own: dict[str, Any] = {"callbacks": [_Noted()] if is_main else []}
        own |= {"seed": dist.get_rank(), "log_bar": False}
        if is_main:
            own |= {"jsonl_path": tmp_path / "log.jsonl", "profile_dir": tmp_path / "profile", "log_bar": True}
        trainer = train(engine, *extra, StateManagerAddon, save_path=tmp_path / "run", save_every=3, **own)
        return [str(trainer.progress_checker.step)]

    assert each_rank(WORLD, rank) == [["12"], ["12"]] if engine == "ddp" else True


class _Noted:
    """A callback that does nothing."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


@pytest.mark.exhaustive
def test_ranks_that_were_given_the_same_end_as_one_process() -> None:
    def rank() -> float:
        return distance(train("fsdp"), train("ddp"))

    assert max(each_rank(WORLD, rank)) < 1e-12


@pytest.mark.parametrize("name", zae.addons.__all__)
def test_replicated_options_are_options_and_name_the_hook_that_reads_them(name: str) -> None:
    add_on = getattr(zae.addons, name)
    for option, hook in add_on.replicated_options.items():
        assert option in options_of(add_on), option
        assert callable(getattr(zae.Trainer, hook, None) or getattr(add_on, hook, None)), hook


def test_the_list_of_what_must_agree_names_code_that_there_is() -> None:
    from zae.loop.run import Run
    from zae.parts import SingleProcess

    owners = {"Run": Run, "Engine": SingleProcess, "Trainer": zae.Trainer}
    for reader in ", ".join(READ_BY.values()).split(", "):
        owner, _, method = reader.partition(".")
        assert callable(getattr(owners[owner], method)), reader


def test_every_replicated_option_is_read_of_a_trainer(tmp_path: Any) -> None:
    """A value that could not be read would be the same on all ranks."""
    trainer = build(None, EMAAddon, GradientAccumulationAddon, StateManagerAddon, save_path=tmp_path)
    record, readers = parts.replicated_options(trainer)
    assert readers.keys() <= option_values(trainer).keys()
    assert {"gradient_clip", "decay", "save_every"} <= record.keys()
