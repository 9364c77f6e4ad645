"""Convert a model to bfloat16, and put `MasterWeights` around its optimizers: what ``AMPAddon(dtype="bf16")`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zae.errors import ConfigError, did_you_mean
from zae.optimizers.master_weights import MasterWeights, check_kind, has_low
from zae.schedulers.lengths import parts_of

__all__ = [
    "MasterFactory",
    "check_dtype",
    "check_optimizer",
    "check_plain",
    "describe",
    "follow",
    "to_bfloat16",
    "with_masters",
]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "fp32"}
# With its weights in bfloat16, and an input or statistics in float32, the CPU refuses a norm. Behind a parametrization
# are the parameters of which a weight is computed, some with buffers in float32.
_IN_FLOAT32 = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    ParametrizationList,
)


def check_dtype(dtype: Any, precision: Any, divides: str | None = None) -> str | None:
    """Return "bf16", or None for a model that keeps its types; refuse what cannot be trained.

    ``divides`` is the name of an add-on that divides the weights.
    """
    name = _NAMES.get(dtype, dtype) if dtype is None or isinstance(dtype, torch.dtype) else dtype
    known = ("bf16", "fp16", "fp32")
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"dtype={dtype!r}; it must be 'bf16', 'fp32' or None" + did_you_mean(str(name), known))
    if name == "fp32":
        return None
    if name == "fp16":
        raise ConfigError(
            f"dtype={dtype!r}: gradients of weights in float16 underflow, and torch's GradScaler refuses them; write "
            "precision='fp16', which keeps the weights in float32, or dtype='bf16'"
        )
    if precision not in ("auto", "bf16"):
        raise ConfigError(
            f"precision={precision!r} with dtype='bf16': weights in bfloat16 compute in it; leave precision out"
        )
    if divides is not None:
        raise ConfigError(
            f"dtype={dtype!r}: {divides} divides the weights, of which MasterWeights needs whole ones; "
            "precision='bf16' computes in bfloat16, and so does FSDPAddon with "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16); leave dtype out"
        )
    return name


def describe(optimizers: Iterable[Any], has_masters: bool) -> str:
    """Return a line that says which weights the optimizers step."""
    if has_masters:
        return "weights in bfloat16; the optimizers step float32 weights (master_weights=True)"
    found = [getattr(each, "bf16_stochastic_round", False) is True for each in optimizers]
    if found and all(found):
        return "weights in bfloat16, which the optimizers round at random (bf16_stochastic_round=True)"
    return (
        "weights in bfloat16 without float32 ones (master_weights=False): steps smaller than 1/256 of a weight are "
        "lost, unless the optimizer rounds at random"
    )


def to_bfloat16(model: nn.Module) -> None:
    """Convert the floating parameters of a model in place; norms and parametrizations are in float32.

    Other buffers keep their types: the frequencies of rotary embeddings are multiplied by positions.
    """
    for module in model.modules():
        is_kept = isinstance(module, _IN_FLOAT32)
        wanted = torch.float32 if is_kept else torch.bfloat16
        for each in (*module.parameters(recurse=False), *(module.buffers(recurse=False) if is_kept else ())):
            if each.is_floating_point() and each.dtype != wanted and type(each.data) is Tensor:
                each.grad = None
                each.data = each.data.to(wanted)


def check_plain(model: nn.Module) -> None:
    """Refuse a model whose weights have no values yet."""
    empty = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if empty is not None:
        raise ConfigError(
            f"dtype='bf16' converts weights, and {empty} is on the meta device, without values; write meta_init=False, "
            "or let the function that makes the model return it in bfloat16, and leave dtype out"
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that cannot step float32 weights; what makes one is not called."""
    if not isinstance(optimizer, Optimizer):
        return
    check_kind(optimizer)
    if type(optimizer).__module__.partition(".")[0] == "torchao":
        raise ConfigError(
            f"dtype='bf16' lets the optimizer step float32 weights, and {type(optimizer).__name__} of torchao is for "
            "weights in bfloat16, which it can round at random; write master_weights=False, and "
            "bf16_stochastic_round=True there, or torch.optim.AdamW"
        )


class MasterFactory:
    """A function that makes an optimizer, and puts `MasterWeights` around it."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.__wrapped__ = factory  # Its signature says what it is called with.

    def __call__(self, given: Any) -> Any:
        made = self.__wrapped__(given)
        return with_masters(made) if isinstance(made, Optimizer) else made


def with_masters(optimizer: Any) -> Any:
    """Return an optimizer, or what makes one, with float32 weights for those of its parameters in bfloat16."""
    if isinstance(optimizer, (MasterFactory, MasterWeights)):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        return MasterFactory(optimizer)
    check_optimizer(optimizer)
    return MasterWeights(optimizer) if has_low(optimizer) else optimizer


def follow(schedulers: Iterable[Any], optimizers: Iterable[Optimizer], mark: Callable[[Optimizer], None]) -> None:
    """Let schedulers and their parts be of the `MasterWeights` around their optimizers; ``mark`` notes its steps."""
    around = {id(each.inner): each for each in optimizers if isinstance(each, MasterWeights)}
    waiting = [*schedulers] if around else []
    for scheduler in waiting:
        waiting += parts_of(scheduler) if hasattr(scheduler, "optimizer") else []
        other = around.get(id(getattr(scheduler, "optimizer", None)))
        if other is not None and isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            scheduler.optimizer = other
            mark(other)
