"""The configuration of DeepSpeed: read it, fill in "auto" with the options of a trainer, and refuse two truths."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zae.errors import ConfigError, did_you_mean
from zae.optim import parameters_of

__all__ = ["ELEMENTWISE", "check_kind", "check_parameters", "fill", "read"]

AUTO = "auto"
ELEMENTWISE = tuple(
    getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta")
)
"""The optimizers that compute each element from its own gradient and state: they may be given a part of a tensor."""

_TUNING = {
    "zero_optimization": (
        *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size"),
        *("contiguous_gradients", "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        "stage3_gather_16bit_weights_on_model_save",
    ),
    "": ("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
}
"""The entries that change how DeepSpeed works, and not what it computes; "auto" leaves its own value."""

_TRUTHS = {
    ("zero_optimization", "stage"),
    ("bf16", "enabled"),
    ("", "gradient_clipping"),
    ("", "gradient_accumulation_steps"),
    ("", "train_micro_batch_size_per_gpu"),
    ("", "train_batch_size"),
}
"""The entries that zae has an option for."""

_INSTEAD = {
    **dict.fromkeys(("fp16", "amp"), "write 'bf16': {'enabled': true}, which needs no loss scale"),
    **dict.fromkeys(("offload_optimizer", "offload_param"), "leave it out, or train with FSDPAddon, cpu_offload=True"),
    "optimizer": "give the trainer an optimizer: optimizer=torch.optim.AdamW(model.parameters(), lr=...)",
    "scheduler": "give the trainer a scheduler: scheduler=zae.schedulers.cosine(warmup=...)",
}


def read(source: Any) -> dict[str, Any]:
    """Return a copy of a configuration, given as a dict or a JSON file; None is an empty one."""
    config = source
    if isinstance(source, (str, Path)):
        try:
            config = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"deepspeed_config={str(source)!r} cannot be read as a JSON file ({error}); give the path of "
                "a configuration, or a dict"
            ) from error
    if not isinstance(config, Mapping | None):
        raise ConfigError(f"deepspeed_config is {config!r:.80}; give a dict, or the path of a JSON file with one")
    config = copy.deepcopy(dict(config or {}))
    for section, key, value in _entries(config):
        _check_entry(section, key, value)
    return config


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of each entry; the section of a top-level one is empty."""
    for key, value in config.items():
        if key in ("zero_optimization", "bf16"):
            if not isinstance(value, Mapping):
                raise ConfigError(f"deepspeed_config: {key} is {value!r}, and must be a dict")
            yield from ((key, inner, entry) for inner, entry in value.items())
        else:
            yield "", key, value


def _check_entry(section: str, key: str, value: Any) -> None:
    """Refuse an entry that zae neither fills in nor leaves to DeepSpeed."""
    place = f"{section}.{key}" if section else key
    if key in _TUNING.get(section, ()) or (section, key) in _TRUTHS:
        return
    settings = value if isinstance(value, Mapping) else {"enabled": value}
    if key in _INSTEAD and (settings.get("enabled") in (False, AUTO) or settings.get("device") == "none"):
        return
    sections = () if section else ("zero_optimization", "bf16")
    names = [*_TUNING.get(section, ()), *(name for where, name in _TRUTHS if where == section), *sections]
    remedy = _INSTEAD.get(key) or f"leave it out{did_you_mean(key, names)}"
    raise ConfigError(f"deepspeed_config: {place} is not used with DeepSpeedAddon; {remedy}")


def fill(config: Mapping[str, Any], truths: Mapping[str, tuple[Any, str]], batch: int | None, world: int) -> Any:
    """Return the configuration for DeepSpeed: with zae's options in place of "auto", and without what zae does itself.

    Parameters
    ----------
    config : mapping
        What `read` returned.
    truths : mapping
        By the path of an entry, the value that zae uses, and how its option is written.
    batch : int, optional
        The batch size of the loader; None is unknown.
    world : int
        The number of ranks.
    """
    sizes: dict[str, tuple[Any, str]] = {}
    if batch is not None:
        windows = truths["gradient_accumulation_steps"][0]
        sizes["train_micro_batch_size_per_gpu"] = (batch, f"batch_size={batch} of the loader")
        whole = batch * windows * world
        sizes["train_batch_size"] = (whole, f"batch_size={batch} of the loader in {windows} batches on {world} ranks")
    for section, key, value in _entries(config):
        place = f"{section}.{key}" if section else key
        truth, option = {**truths, **sizes}.get(place, (value, ""))
        if value != AUTO and (value != truth or isinstance(value, bool) != isinstance(truth, bool)):
            raise ConfigError(
                f"deepspeed_config has {place}={value!r}, and the trainer {option}; write 'auto' there, or the same "
                "in both"
            )
    tuning = {key: value for key, value in config.items() if key in _TUNING[""] and value != AUTO}
    zero = config.get("zero_optimization", {})
    clip = truths["gradient_clipping"][0]
    return {
        **tuning,
        "train_micro_batch_size_per_gpu": batch or 1,
        "gradient_accumulation_steps": 1,  # zae weighs the batches of a window by their samples.
        "gradient_clipping": 0.0 if clip == math.inf else clip,
        "zero_allow_untested_optimizer": True,  # `check_kind` has looked at it.
        "zero_optimization": {
            **{key: value for key, value in zero.items() if key in _TUNING["zero_optimization"] and value != AUTO},
            "stage": truths["zero_optimization.stage"][0],
        },
        "bf16": {"enabled": truths["bf16.enabled"][0]},
    }


def check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of other parameters than those of the model that are trained."""
    trained = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    in_optimizer = set(map(id, parameters_of(optimizer)))
    if not trained.keys() >= in_optimizer or not in_optimizer.issuperset(
        key for key, is_trained in trained.items() if is_trained
    ):
        raise ConfigError(
            "DeepSpeed trains the parameters of the model, all of them in the optimizer; put others into the model, "
            "freeze those that the optimizer does not have, or train with MultiGPUAddon"
        )


def check_kind(optimizer: Optimizer, is_allowed: bool) -> None:
    """Refuse an optimizer that may need whole tensors: each rank gives it a part of all of them in one."""
    if type(optimizer) not in ELEMENTWISE and not is_allowed:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigError(
            f"ZeRO gives {type(optimizer).__name__} a part of all parameters in one flat tensor, and it may need "
            f"them whole. Take one of {names}; if it computes each element on its own, write "
            "'zero_allow_untested_optimizer': true in deepspeed_config"
        )
