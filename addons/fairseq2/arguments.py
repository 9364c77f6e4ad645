"""Read the arguments of ``fairseq2.recipes.trainer.Trainer``, and refuse what it refuses, with what to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zae.addons.fairseq2.reader import check_reader
from zae.addons.fairseq2.unit import check_unit
from zae.arguments import Count, CountOrZero, NonNegative, Seed, check_argument
from zae.errors import ConfigError, OptionError, did_you_mean, kind_of

__all__ = ["DEFAULTS", "REPORTED", "Arguments", "describe", "read_arguments"]

Arguments = SimpleNamespace
"""The arguments with their defaults, by name."""

# What each argument that has none must be.
REQUIRED = {
    "unit": "the train unit: unit(batch) -> (loss, num_targets)",
    "data_reader": "a DataReader, whose next() returns the batches of a step",
    "optimizer": "a torch optimizer of unit.model.parameters()",
}
# The others of versions 0.2 to 0.4, with what they are where they are left out.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("checkpoint_manager", "root_gang", "dp_gang", "tp_gang", "gangs", "lr_scheduler", "amp")),
    "dtype": torch.float32,
    "fp16_loss_scale": (128.0, 0.0001),
    **dict.fromkeys(("max_gradient_norm", "max_num_steps", "max_num_data_epochs", "valid_units", "valid_data_readers")),
    **{
        f"{what}_after_n_{unit}": 0
        for what in ("validate", "checkpoint", "publish_metrics")
        for unit in ("steps", "data_epochs")
    },
    **{
        f"{what}_every_n_{unit}": None
        for what in ("validate", "checkpoint", "publish_metrics")
        for unit in ("steps", "data_epochs")
    },
    **dict.fromkeys(("keep_last_n_checkpoints", "keep_best_n_checkpoints", "keep_last_n_models", "keep_best_n_models")),
    **dict.fromkeys(("score_metric_name", "score_metric_descriptor", "lower_better", "early_stopper")),
    **dict.fromkeys(("tb_dir", "metrics_dir", "profile", "profiler")),
    "anomaly_detection": False,
    "seed": 2,
}
# Those that have no effect here, and why.
REPORTED = {
    **dict.fromkeys(("wall_watch", "progress_reporter"), "the run shows its progress itself, see log_bar"),
    **dict.fromkeys(
        ("metric_recorder", "metric_recorders"),
        "records go to logger add-ons: give tb_dir or metrics_dir, or add WandBLoggerAddon",
    ),
    "device_stat_tracker": "add ThroughputAddon, which logs the memory of the device too",
    "garbage_collector": "call gc.freeze() in your script",
    "gradient_check": "ranks compare their weights whenever a state is saved",
    "monitored_gang": "it is for setup_root_gang; a rank that does not answer is given up after the option timeout",
    "no_sync_grad_accumulation": "gradients are always accumulated on each rank, and averaged once in a step",
    "validate_at_start": "call trainer.evaluate(converted.valid_loader) before the run",
    "save_model_only": "a checkpoint has the whole state, so that a run can resume",
    "keep_checkpoint_every_n_steps": "keep_last_n_checkpoints and keep_best_n_checkpoints decide what is kept",
    "hugging_face_saver": "save the model in on_save(path)",
}
_PLACES = ("_checkpoint_dir", "checkpoint_dir")  # Of a checkpoint manager.


def read_arguments(options: Mapping[str, Any]) -> Arguments:
    """Return the arguments with their defaults; refuse names, values and combinations that fairseq2 refuses."""
    for name in options:
        if name not in REQUIRED and name not in DEFAULTS and name not in REPORTED:
            known = [*REQUIRED, *DEFAULTS, *REPORTED]
            raise OptionError(f"{name!r} is not an argument of fairseq2's Trainer{did_you_mean(name, known)}")
    for name, meaning in REQUIRED.items():
        if options.get(name) is None:
            raise OptionError(f"from_arguments needs {name}, {meaning}; write {name}=...")
    args = SimpleNamespace(**{**DEFAULTS, **options})
    check_unit("unit", args.unit)
    check_reader("data_reader", args.data_reader)
    for check in (_check_numbers, _check_length, _check_score, _check_validation, _check_checkpoints, _check_precision):
        check(args)
    return args


def _check_numbers(args: Arguments) -> None:
    for name in DEFAULTS:
        if "_n_" in name or name.startswith("max_num_"):
            kind = CountOrZero if "_after_" in name else Count | None
            setattr(args, name, check_argument(name, getattr(args, name), kind))
    if check_argument("max_gradient_norm", args.max_gradient_norm, NonNegative | None) == 0:
        raise ConfigError("max_gradient_norm=0 would leave no gradient; leave it out, and nothing is clipped")
    args.seed = check_argument("seed", args.seed, Seed)
    for name in ("anomaly_detection", "amp", "lower_better"):
        check_argument(name, getattr(args, name) or False, bool)


def _check_length(args: Arguments) -> None:
    if args.max_num_steps is None and args.max_num_data_epochs is None:
        raise ConfigError(
            "max_num_steps and max_num_data_epochs are None, so the run would not end; write max_num_steps=1000, which "
            "fairseq2 0.2 took, or max_num_data_epochs=1"
        )


def _check_score(args: Arguments) -> None:
    """Find the name of the score and its direction, and the function of the early stopper."""
    descriptor = args.score_metric_descriptor
    if args.score_metric_name is None:
        args.score_metric_name = getattr(descriptor, "name", descriptor)
    if args.lower_better is None and hasattr(descriptor, "higher_better"):
        args.lower_better = not descriptor.higher_better
    args.early_stopper = getattr(args.early_stopper, "should_stop", args.early_stopper)
    if args.early_stopper is not None and not args.valid_units:
        raise ConfigError(
            "early_stopper is called after validations; write valid_units=[...], valid_data_readers=[...]"
        )


def _check_validation(args: Arguments) -> None:
    """Refuse units without readers, readers without units, and what is neither."""
    for name in ("valid_units", "valid_data_readers"):
        several = getattr(args, name)
        if several is not None and not isinstance(several, (list, tuple)):
            raise ConfigError(f"{name} is {kind_of(several)}; give a list, one entry for each: {name}=[...]")
        setattr(args, name, list(several or ()))
    if len(args.valid_units) != len(args.valid_data_readers):
        raise ConfigError(
            f"there are {len(args.valid_units)} valid_units and {len(args.valid_data_readers)} valid_data_readers; "
            "give a reader for each unit, in the same order"
        )
    for index, (unit, reader) in enumerate(zip(args.valid_units, args.valid_data_readers)):
        check_unit(f"valid_units[{index}]", unit)
        check_reader(f"valid_data_readers[{index}]", reader)
        if reader is args.data_reader:
            raise ConfigError(
                f"valid_data_readers[{index}] is data_reader itself, which a validation would read to its end; make a "
                "second reader"
            )


def _check_checkpoints(args: Arguments) -> None:
    """Find the folder of the checkpoints."""
    args.save_path = None if args.checkpoint_manager is None else _folder_of(args.checkpoint_manager)
    wanting = [name for name in DEFAULTS if name.startswith(("checkpoint_every", "keep_")) and getattr(args, name)]
    if wanting and args.save_path is None:
        raise ConfigError(
            f"{wanting[0]}={getattr(args, wanting[0])} needs a folder; write checkpoint_manager=Path('runs/unit')"
        )


def _folder_of(manager: Any) -> Path:
    """Return the folder of a checkpoint manager; refuse one with checkpoints of fairseq2."""
    place = next((getattr(manager, name) for name in _PLACES if hasattr(manager, name)), manager)
    if not isinstance(place, (str, os.PathLike)):
        raise ConfigError(
            f"checkpoint_manager is {kind_of(manager)}, which does not tell its folder; write "
            "checkpoint_manager=Path('runs/unit')"
        )
    folder = Path(place)
    for foreign in sorted(folder.glob("step_*")):
        raise ConfigError(
            f"checkpoint_manager: {folder} contains {foreign.name} of fairseq2, from which a run cannot resume here; "
            "load its weights into the model, and give a new folder: checkpoint_manager=Path('runs/unit')"
        )
    return folder


def _check_precision(args: Arguments) -> None:
    """Refuse a type that neither the model has nor ``amp`` computes in."""
    dtypes = {parameter.dtype for parameter in args.unit.model.parameters() if parameter.is_floating_point()}
    is_half = args.dtype in (torch.float16, torch.bfloat16)
    if is_half and not args.amp and (dtypes != {args.dtype} or args.dtype is torch.float16):
        raise ConfigError(
            f"dtype={args.dtype} without amp=True is the type of the model, and its parameters are "
            f"{', '.join(sorted(map(str, dtypes)))}; write amp=True with the model in float32, "
            "or dtype=torch.bfloat16 and model.bfloat16() before the optimizer is made"
        )


def describe(value: Any) -> str:
    """Return a value for the report: an object by its type."""
    plain: tuple[Any, ...] = (bool, int, float, str, Path, tuple, torch.dtype)
    return repr(value) if isinstance(value, plain) else f"<{type(value).__name__}>"
