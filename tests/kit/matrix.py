"""Compare compositions of add-ons with the loop of tests/kit/oracle.py."""

from __future__ import annotations

import dataclasses
import itertools
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchmetrics import MeanMetric

import zae
from kit import oracle
from kit.oracle import Options, Outcome
from kit.table import Watcher


class MeanLoss(MeanMetric):
    """The mean of a loss, or of the sum of one for each optimizer."""

    def update(self, value: Any, weight: Any = None) -> None:
        super().update(sum(value.values()) if isinstance(value, dict) else value, weight)


class Piece(NamedTuple):
    """How an add-on takes part: what it adds to the oracle's options, and what the trainer is then given."""

    draw: Callable[[random.Random], dict[str, Any]]
    keywords: Callable[[Options, Path], dict[str, Any]]


def _nothing(_: random.Random) -> dict[str, Any]:
    """An observer changes nothing that the oracle knows of."""
    return {}


PIECES: dict[str, Piece] = {
    "AMPAddon": Piece(
        lambda draw: {
            "precision": draw.choice(["bf16", "fp16", "weights"]),
            "scale": 2.0 ** draw.choice([10, 16, 22]),
        },
        lambda o, _: (
            {"dtype": "bf16"} if o.precision == "weights" else {"precision": o.precision, "loss_scale": (o.scale, 1.0)}
        ),
    ),
    "GradientAccumulationAddon": Piece(
        lambda draw: {"accumulate": draw.choice([1, 2, 3, 4, 7])},
        lambda o, _: {"gradient_accumulation_steps": o.accumulate},
    ),
    "EMAAddon": Piece(lambda draw: {"decay": draw.choice([0.0, 0.5, 0.9])}, lambda o, _: {"decay": o.decay}),
    "EarlyStoppingAddon": Piece(
        lambda draw: {"patience": draw.choice([1, 2, 3]), "delta": draw.choice([0.0, 0.05])},
        lambda o, _: {"patience": o.patience, "delta": o.delta},
    ),
    "SpikeGuardAddon": Piece(_nothing, lambda _, folder: {"spike_threshold": 1e9}),
    "CallbackAddon": Piece(_nothing, lambda _, folder: {"callbacks": [Watcher]}),
    "StateManagerAddon": Piece(_nothing, lambda _, folder: {"save_path": folder / "save", "save_every": 3}),
    "JSONLLoggerAddon": Piece(_nothing, lambda _, folder: {"jsonl_path": folder / "log.jsonl"}),
    "TensorBoardLoggerAddon": Piece(_nothing, lambda _, folder: {"log_dir": folder / "board"}),
    "LedgerAddon": Piece(_nothing, lambda _, folder: {"ledger_path": folder / "ledger.jsonl"}),
    "PrefetchAddon": Piece(_nothing, lambda _, folder: {}),
    "HuggingFaceAddon": Piece(_nothing, lambda _, folder: {}),
    "GradientCheckpointingAddon": Piece(_nothing, lambda _, folder: {"checkpoint_modules": torch.nn.Linear}),
    "ActivationOffloadAddon": Piece(_nothing, lambda _, folder: {"offload_modules": torch.nn.Linear}),
    "AnomalyAddon": Piece(_nothing, lambda _, folder: {"anomaly_steps": (2, 5)}),
    "ThroughputAddon": Piece(_nothing, lambda _, folder: {}),
    "ProfilerAddon": Piece(
        _nothing, lambda _, folder: {"profile_dir": folder / "profile", "profile_schedule": (1, 1, 1, 1)}
    ),
    "TorchMetricsAddon": Piece(
        _nothing,
        lambda _, folder: {
            "torch_metrics": {"measured": MeanLoss()},
            "torch_metrics_inputs": {"measured": "loss"},
            "torch_metrics_splits": ("train", "valid"),
        },
    ),
}
"""Every add-on that one process runs with, and that a test can afford in all combinations."""

ELSEWHERE = {
    "CompileAddon": "a graph rounds otherwise, and takes time to compile",
    "MultiGPUAddon": "of several processes",
    "FSDPAddon": "of several processes",
    "TensorParallelAddon": "of several processes",
    "PipelineAddon": "of several processes",
    "DeepSpeedAddon": "of several processes",
    "AccelerateAddon": "of several processes",
    "PEFTAddon": "its adapters make another model",
    "LoggerAddon": "the base of the loggers",
    "WebLoggerAddon": "the base of the loggers that send",
    "WandBLoggerAddon": "its client takes half a second to start",
    "NeptuneLoggerAddon": "its client takes seconds to start",
    "MLflowLoggerAddon": "its client takes seconds to start",
    "TrackioLoggerAddon": "its client takes seconds to start",
}
"""Add-ons whose own tests hold them against the loop, and why that is not done here."""


CONFIGURATION_FOR_TRACES = Options(
    precision="bf16", accumulate=4, decay=0.8, patience=9, clip=0.5, scheduler="batch", validate=1, epochs=1
)
"""Everything is on, so that every hook has something to do."""


def add_ons() -> dict[str, Any]:
    """The add-ons of `PIECES` that are installed."""
    import zae.addons

    return {name: getattr(zae.addons, name) for name in PIECES if name in zae.addons.__all__}


# ---------------------------------------------------------------------------------------------------- the trainer


class Task(zae.Trainer):
    """The steps of the oracle's problem, as a user of zae writes them."""

    settings: Options

    def train_step(self, batch: Any) -> dict[str, Any]:
        return self._returned(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self._returned(batch)

    def _returned(self, batch: Any) -> dict[str, Any]:
        losses, targets = oracle.losses_of(self.model, batch, self.settings)
        out: dict[str, Any] = {"loss": losses[0]} if len(losses) == 1 else {"loss": dict(zip("ab", losses))}
        return out if targets is None else {**out, "num_targets": targets}


def build(cls: Any, options: Options, folder: Path, chosen: Iterable[str]) -> tuple[Any, Any, Any]:
    """Make a trainer and its loaders from the oracle's own parts."""
    model, optimizers, schedulers, loader, valid = oracle.make(options)
    keywords: dict[str, Any] = {}
    for name in chosen:
        keywords |= PIECES[name].keywords(options, folder)
    single = options.networks == 1
    trainer = cls(
        model,
        "cpu",
        optimizer=optimizers[0] if single else dict(zip("ab", optimizers)),
        scheduler=(schedulers[0] if single else dict(zip("ab", schedulers))) if schedulers else None,
        scheduler_step_on_batch=options.scheduler == "batch",
        gradient_clip=options.clip,
        monitor="loss" if single else "loss/a",
        log_every=1,
        **keywords,
    )
    trainer.settings = options
    return trainer, loader, valid


def run(cls: Any, options: Options, chosen: Iterable[str]) -> Any:
    """Train with zae; return the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, loader, valid = build(cls, options, Path(folder), chosen)
        every = options.validate if isinstance(options.validate, int) else zae.Every(epochs=1)
        trainer.run(options.epochs, loader, valid, valid_every=every, max_steps=options.max_steps)
        return trainer


# -------------------------------------------------------------------------------------------------- the comparison


@cache
def expected(options: Options) -> Outcome:
    return oracle.train(options)


def difference(trainer: Any, options: Options) -> str | None:
    """Name the first thing in which a trainer's run differs from the hand-written one."""
    want = expected(options)
    random_now = torch.get_rng_state()
    steps = [{"step": r["step"], **_named(r, "train/")} for r in trainer.log_history if any("train/" in k for k in r)]
    steps = steps if trainer.log_every == zae.Every(steps=1) else want.step_rows
    ends = len(want.train_rows)  # At the end of an epoch its own means are logged again, only with epochs=1.
    have: dict[str, tuple[Any, Any]] = {
        "weights": (want.weights, trainer.model.state_dict()),
        "optimizer state": (want.optimizers, [o.state_dict() for o in trainer.optimizers.values()]),
        "scheduler state": (want.schedulers, [s.state_dict() for s in trainer.schedulers.values()]),
        "losses of the epochs": (want.train_rows, [_named(r, "train_") for r in trainer.train_history][:ends]),
        "losses of the validations": (want.valid_rows, [_named(r, "valid_") for r in trainer.valid_history]),
        "losses of the steps": (want.step_rows, steps),
        "number of steps": (want.step, trainer.progress_checker.step),
        "number of skipped steps": (want.skipped, trainer.progress_checker.skipped_steps),
        "early stop": (want.stopped, trainer.progress_checker.stop_reason is not None),
        "random state": (want.random, random_now),
    }
    if want.average is not None:
        have["average"] = (want.average, trainer.average)
    if want.scaler is not None:
        have["loss scale"] = (want.scaler, trainer.precision_part.state_dict())
    for what, (a, b) in have.items():
        found = first_difference(a, b)
        if found is not None:
            return f"{what}{found}"
    return None


def _named(row: Any, prefix: str) -> dict[str, float]:
    """A row under the oracle's names, which knows no other metric than the loss."""
    row = {key: value for key, value in row.items() if "measured" not in key}
    kept = {k: v for k, v in row.items() if k in ("epoch", "step") or k.startswith((prefix, "lr"))}
    if prefix == "train/":
        return {k.removeprefix(prefix): v for k, v in kept.items() if k.startswith(prefix)}
    return {k.removeprefix(prefix): v for k, v in kept.items()}


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """Compare nested states bitwise; return where they differ, and how."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        return None if same else f"{where}: {a.flatten()[:3].tolist()} by hand, {b.flatten()[:3].tolist()} here"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: {sorted(map(str, a))} by hand, {sorted(map(str, b))} here"
        return next((f for k in a if (f := first_difference(a[k], b[k], f"{where}[{k!r}]")) is not None), None)
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        if len(a) != len(b):
            return f"{where}: {len(a)} by hand, {len(b)} here"
        return next((f for i, x in enumerate(a) if (f := first_difference(x, b[i], f"{where}[{i}]")) is not None), None)
    return None if repr(a) == repr(b) else f"{where}: {a!r} by hand, {b!r} here"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN is what it was, and -0.0 is not 0.0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------------------------- the proof


def assert_is_by_hand(chosen: Iterable[str], options: Options) -> None:
    """Raise with the smallest set of add-ons that does not do what the hand-written loop does."""
    chosen = list(chosen)
    known = add_ons()
    trainer = run(Task.add_on(*(known[name] for name in chosen)), options, chosen)
    found = difference(trainer, options)
    if found is not None:
        raise AssertionError(blame(chosen, options, found))


def without(options: Options, absent: Iterable[str]) -> Options:
    """The options with those of some add-ons back at their defaults."""
    fields: set[str] = set()
    for name in absent:
        fields |= PIECES[name].draw(random.Random(0)).keys()
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    return dataclasses.replace(options, **{name: defaults[name] for name in fields})


def blame(chosen: list[str], options: Options, found: str) -> str:
    """Say which add-ons it takes to go wrong: none, one, a pair, or more."""
    known = add_ons()
    for size in range(len(chosen) + 1):
        for few in itertools.combinations(sorted(chosen), size):
            fewer = without(options, set(chosen) - set(few))
            try:
                trainer = run(Task.add_on(*(known[name] for name in few)) if few else Task, fewer, few)
                differs = difference(trainer, fewer)
            except Exception as error:
                differs = f"{type(error).__name__}: {error}"
            if differs is not None:
                who = " with ".join(few) if few else "the loop itself, without any add-on,"
                return f"{who} is not the hand-written loop: {differs}\n  options: {fewer}\n  found in: {chosen}"
    return f"{' with '.join(chosen)} went wrong once and not again: {found}"


def draw_options(draw: random.Random, chosen: Iterable[str]) -> Options:
    """Random options for the loop, and for some add-ons."""
    fields: dict[str, Any] = {
        "clip": draw.choice([0.0, 0.05, 0.5]),
        "count_targets": draw.random() < 0.5,
        "scheduler": draw.choice([None, "batch", "epoch", "plateau"]),
        "validate": draw.choice([None, 1, 2, 3, "epoch"]),
        "networks": draw.choice([1, 1, 2]),
        "optimizer": draw.choice(["adamw", "sgd"]),
        "epochs": draw.choice([1, 2, 3]),
        "max_steps": draw.choice([None, None, 4, 5]),
        "seed": draw.randrange(100),
    }
    if fields["scheduler"] == "plateau" and fields["validate"] is None:
        fields["validate"] = "epoch"  # Refused otherwise, before the first batch.
    for name in chosen:
        fields |= PIECES[name].draw(draw)
    return Options(**fields)
