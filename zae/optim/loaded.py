"""Compare what was loaded into an optimizer or a schedule with what it says of itself afterwards."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zae.errors import CheckpointMismatch
from zae.values.strides import is_laid_out
from zae.values.walk import has_same_bits, is_sharded, leaves_of

__all__ = ["check_loaded", "compares_bits", "difference", "with_enums"]

_SMALL = 64 << 20
"""Bytes up to which tensors are compared bit by bit."""


def check_loaded(kind_of_part: str, part: Any, state: Any) -> None:
    """Refuse an optimizer or a schedule that says, right after a load, that its state is another one.

    It may have more than was saved: a newer version of torch adds settings.
    """
    kind = type(part).__name__
    loaded = part.state_dict()
    expected = with_enums(state, loaded)
    compares = compares_bits(expected) and compares_bits(loaded)
    if problem := difference(expected, loaded, kind_of_part, compares=compares, may_have_more=True):
        raise CheckpointMismatch(
            f"{kind_of_part} {kind} does not load its own state: {problem}. A run cannot be resumed from it; let "
            f"{kind}.load_state_dict restore what its state_dict returns"
        )


def compares_bits(state: Any) -> bool:
    """Return whether the tensors of a state are compared bit by bit: if they are small, and whole on this rank."""
    tensors = [each for _, each in leaves_of(state, "") if isinstance(each, Tensor)]
    if any(nn.parameter.is_lazy(tensor) or tensor.is_meta or is_sharded(tensor) for tensor in tensors):
        return False
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _SMALL


def difference(saved: Any, loaded: Any, path: str, *, compares: bool = True, may_have_more: bool = False) -> str:
    """Return where a loaded state differs from the saved one; else an empty string.

    Without ``compares`` the bits of tensors are not read. With ``may_have_more`` a dict may have got more entries.
    """
    pairs: list[tuple[Any, Any, Any]] | None = None
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        if saved.keys() == loaded.keys() or (may_have_more and saved.keys() < loaded.keys()):
            pairs = [(key, saved[key], loaded[key]) for key in saved]
    elif isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        pairs = [(index, before, after) for index, (before, after) in enumerate(zip(saved, loaded))]
    if pairs is not None:
        texts = (
            difference(before, after, f"{path}[{key!r}]", compares=compares, may_have_more=may_have_more)
            for key, before, after in pairs
        )
        return next(filter(None, texts), "")
    if _are_alike(saved, loaded):
        if saved.stride() != loaded.stride():
            return f"{path} had the strides {saved.stride()} and has {loaded.stride()}"
        if not compares:
            return ""
    if has_same_bits(saved, loaded):
        return ""
    return f"{path} was {_describe(saved)} and is {_describe(loaded)}"


def _are_alike(a: Any, b: Any) -> bool:
    """Return whether two values are tensors of one shape and type."""
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor) and is_laid_out(a) and is_laid_out(b)
    return are_tensors and (a.shape, a.dtype) == (b.shape, b.dtype)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, {value.detach().flatten()[:3].tolist()}"
    return " ".join(repr(value).split())[:80]


def with_enums(saved: Any, present: Any) -> Any:
    """Return a saved state with the members of an Enum where the present one has some: a checkpoint has their values.

    SCION of pytorch_optimizer has some among the settings of its groups.

    Raise ValueError for a value that none of its members has.
    """
    if isinstance(present, enum.Enum):
        return type(present)(saved)
    if type(saved) is dict and isinstance(present, Mapping):
        return {key: with_enums(each, present.get(key)) for key, each in saved.items()}
    if type(saved) in (list, tuple) and isinstance(present, (list, tuple)) and len(saved) == len(present):
        return type(saved)(with_enums(value, model) for value, model in zip(saved, present))
    return saved
