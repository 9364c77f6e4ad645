"""The trainer's own part of a state: read in one piece, loaded wholly or not at all."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zae import optim
from zae.errors import CheckpointMismatch
from zae.progress import ProgressChecker
from zae.records import EpochLog, Metrics

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["load_core", "load_weights", "read_core"]

_log = logging.getLogger("zae")
_KEYS = ("model", "optimizer", "scheduler", "progress", "records", "position")
_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 10


def read_core(trainer: Trainer) -> dict[str, Any]:
    """Return the state of a trainer without its add-ons."""
    trainer.nonfinite.settle(trainer)
    return {
        "model": trainer.model_state(),
        "optimizer": {name: each.state_dict() for name, each in _optimizers(trainer).items()},
        "scheduler": {name: each.state_dict() for name, each in _schedulers(trainer).items()},
        "progress": trainer.progress_checker.state_dict(),
        "records": {
            "log_train": trainer.log_train.state_dict(),
            "logged": dict(trainer._logged),
            "train_metrics": dict(trainer.train_metrics),
            "test_metrics": dict(trainer.test_metrics),
            "train_history": [dict(row) for row in trainer.train_history],
            "valid_history": [dict(row) for row in trainer.valid_history],
            "log_history": [dict(row) for row in trainer.log_history],
            "best": dict(trainer.best),
        },
        "position": trainer._position.state_dict(),
    }


def load_core(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> None:
    """Check the whole state first, and only then take it over."""
    missing = [key for key in _KEYS if key not in state]
    leftover = [str(key) for key in state if key not in _KEYS]
    if missing:
        raise CheckpointMismatch(f"the state has no {', '.join(missing)}; it holds {', '.join(map(str, state))}")
    if leftover:
        text = f"nobody here takes the state of {', '.join(leftover)}; add it with .add_on({', '.join(leftover)})"
        if strict:
            raise CheckpointMismatch(f"{text}, or load with strict=False to leave it out")
        _log.warning("%s", text)
    optimizers, schedulers = _optimizers(trainer), _schedulers(trainer)
    weights = _fit(trainer.unwrap(), state["model"], strict)
    for what, present in (("optimizer", optimizers), ("scheduler", schedulers)):
        if set(state[what]) != set(present):
            raise CheckpointMismatch(
                f"the state is of the {what}s {sorted(state[what])}, and this trainer has {sorted(present)}; build the "
                "trainer as it was, or load only the weights: apply_weights(path)"
            )
    for name, optimizer in optimizers.items():
        optim.check_groups(name, optimizer, state["optimizer"][name])
    progress, log = ProgressChecker(), EpochLog("log_train")
    progress.load_state_dict(state["progress"])
    log.load_state_dict(state["records"]["log_train"])

    trainer.unwrap().load_state_dict(weights, strict=strict)
    # A torch optimizer takes the tensors of a state over as its own: without a copy, two trainers would share them.
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"][name]))
    for name, scheduler in schedulers.items():
        scheduler.load_state_dict(copy.deepcopy(state["scheduler"][name]))
    trainer.progress_checker, trainer.log_train = progress, log
    trainer._calls = len(progress.run_starts)
    trainer._position.load_state_dict(state["position"])
    _load_records(trainer, state["records"])


def _load_records(trainer: Trainer, records: Mapping[str, Any]) -> None:
    trainer._logged = {key: (float(total), float(weight)) for key, (total, weight) in records["logged"].items()}
    trainer.train_metrics = Metrics(records["train_metrics"])
    trainer.test_metrics = Metrics(records["test_metrics"])
    trainer.train_history = [Metrics(row) for row in records["train_history"]]
    trainer.valid_history = [Metrics(row) for row in records["valid_history"]]
    trainer.log_history = [dict(row) for row in records["log_history"]]
    trainer.best = Metrics(records["best"])


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> None:
    """Load weights into a module, or raise and leave it unchanged."""
    module.load_state_dict(_fit(module, weights, strict), strict=strict)


def _fit(module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> dict[str, Tensor]:
    """Take off what wrappers put before the keys, and refuse weights of another model."""
    own = module.state_dict()
    weights = dict(weights)
    while weights and not set(weights) & set(own):
        prefix = next((p for p in _PREFIXES if all(key.startswith(p) for key in weights)), None)
        if prefix is None:
            break
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    missing = [key for key in own if key not in weights]
    unexpected = [key for key in weights if key not in own]
    shapes = [
        f"{key} is {tuple(value.shape)} and must be {tuple(own[key].shape)}"
        for key, value in weights.items()
        if isinstance(own.get(key), Tensor) and isinstance(value, Tensor) and value.shape != own[key].shape
    ]
    # A shape is refused with strict=False too: torch would raise in the middle of loading.
    wrong = {"shapes differ": shapes} | ({"missing": missing, "unexpected": unexpected} if strict else {})
    parts = [
        f"{len(v)} {k} ({', '.join(v[:_SHOWN])}{', ...' if len(v) > _SHOWN else ''})" for k, v in wrong.items() if v
    ]
    if parts:
        raise CheckpointMismatch(
            f"the weights do not fit {type(module).__name__}: {'; '.join(parts)}; nothing was loaded. "
            "Build the model as it was saved" + ("" if shapes else ", or load what fits with strict=False")
        )
    if not strict and (missing or unexpected):
        _log.warning("weights missing: %s; unexpected: %s", missing[:_SHOWN], unexpected[:_SHOWN])
    return weights


def _optimizers(trainer: Trainer) -> dict[str, Any]:
    """The optimizers, also before the trainer is set up."""
    return _built(trainer._optimizers, trainer.optimizer)


def _schedulers(trainer: Trainer) -> dict[str, Any]:
    return _built(trainer._schedulers, trainer.scheduler)


def _built(ready: dict[str, Any], given: Any) -> dict[str, Any]:
    return ready or {name: each for name, each in optim.named(given).items() if hasattr(each, "state_dict")}
