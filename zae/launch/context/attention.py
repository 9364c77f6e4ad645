"""Attention and dropout over a divided sequence: what stands in for the functions of torch in a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zae.errors import ConfigError
from zae.launch.context.division import Division

__all__ = ["Attention"]

_PLAIN = functional.scaled_dot_product_attention
_DROPOUT = functional.dropout


class Attention:
    """Attention that gathers keys and values along the sequence, and dropout with the masks of one process.

    Attributes
    ----------
    others : set of int
        How many keys the calls had that attend to something else than a divided sequence.
    """

    def __init__(self, usual: int) -> None:
        self.others: set[int] = set()
        self._usual = usual  # The dimension of the sequence in the first input.
        self._dropped: dict[int, set[int]] = {}  # The dimensions of the sequence in what was dropped, by their number.
        self._divisions: Mapping[int, Division] = {}

    @contextmanager
    def over(self, divisions: Mapping[int, Division]) -> Iterator[None]:
        """Stand in for the functions of torch; a division is found by the length of a rank's part."""
        before, plain, is_fast = self._divisions, functional.scaled_dot_product_attention, _fast_path()
        dropout = functional.dropout
        self._divisions = divisions
        functional.scaled_dot_product_attention = self._attend  # type: ignore[assignment]
        functional.dropout = self._drop
        torch.backends.mha.set_fastpath_enabled(False)  # It does not call the function.
        try:
            yield
        finally:
            self._divisions = before
            functional.scaled_dot_product_attention, functional.dropout = plain, dropout
            torch.backends.mha.set_fastpath_enabled(is_fast)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        with _plain():
            return self._over_all(query, key, value, attn_mask, dropout_p, is_causal, options)

    def _over_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        options: dict[str, Any],
    ) -> Tensor:
        """Gather the keys and values of a divided sequence, and attend to them."""
        division, length = self._divisions.get(key.shape[-2]), query.shape[-2]
        is_divided = length in self._divisions
        if division is None:
            self.others.add(key.shape[-2])
            if is_causal and is_divided:
                raise ConfigError(
                    f"is_causal=True of an attention from a divided sequence to {key.shape[-2]} keys that are not of "
                    "it; give it a mask, whose rows are those of this rank"
                )
            return _PLAIN(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if dropout_p:
            raise ConfigError(
                f"dropout_p={dropout_p:g} of an attention draws random numbers for a part of the sequence, which would "
                "not be those of one process; write dropout_p=0"
            )
        mask = None if attn_mask is None else _whole_mask(attn_mask, division, is_divided)
        key, value = _gather_both(key, value, division)
        if query.untyped_storage().nbytes() > query.nbytes:  # Else it would keep this rank's keys and values as well.
            query = query.clone()
        if not (is_causal and is_divided):
            return _PLAIN(query, key, value, mask, 0.0, is_causal, **options)
        if self._divisions[length] is not division:
            raise ConfigError("is_causal=True of an attention from one sequence to another one; give it a mask")
        return _causal(query, key, value, division, options)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Draw the mask of the whole sequence, as one process does, and apply this rank's part of it."""
        dims = [dim for dim, size in enumerate(input.shape) if size in self._divisions]
        if not training or not p or not dims:
            return _DROPOUT(input, p, training, inplace)
        known = self._dropped.setdefault(input.dim(), set())
        if len(dims) > 1:  # Another dimension is as long as a part: the check has compared the first choice.
            dims = [dim for dim in dims if dim in (known or {self._usual % input.dim()})]
            if len(dims) != 1:
                raise ConfigError(
                    f"dropout of a tensor of {tuple(input.shape)}, in which a part of the sequence cannot be told from "
                    "another dimension; pad the sequence to another length"
                )
        known.add(dims[0])
        division = self._divisions[input.shape[dims[0]]]
        shape = [division.length if dim == dims[0] else size for dim, size in enumerate(input.shape)]
        with _plain():
            mask = division.take(_DROPOUT(input.new_ones(shape), p), dims[0])
        return input.mul_(mask) if inplace else input * mask


@contextmanager
def _plain() -> Iterator[None]:
    """Put the functions of torch back: they look themselves up by their names."""
    before = functional.scaled_dot_product_attention, functional.dropout
    functional.scaled_dot_product_attention, functional.dropout = _PLAIN, _DROPOUT
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = before


def _fast_path() -> bool:
    found: bool = torch.backends.mha.get_fastpath_enabled()
    return found


def _whole_mask(mask: Tensor, division: Division, is_divided: bool) -> Tensor:
    """Return a mask over all keys: one that is alike for all queries is gathered."""
    columns, rows = mask.shape[-1], mask.shape[-2] if mask.dim() > 1 else 1
    if columns in (1, division.length) and (not is_divided or rows != division.length or rows == 1):
        return mask
    if columns == division.local and rows == 1:
        return division.gather(mask, -1)
    raise ConfigError(
        f"attn_mask is of {rows} queries and {columns} keys, and this rank has {division.local} of the "
        f"{division.length} positions of the sequence, and attends to all of them. For a causal mask write "
        "is_causal=True and no attn_mask. Else give the model a mask with all rows and columns, and name it in "
        "context_inputs with the dimensions of both, {'mask': (2, 3)}; or one that is alike for all queries, of one row"
    )


def _causal(query: Tensor, key: Tensor, value: Tensor, division: Division, options: dict[str, Any]) -> Tensor:
    """Let each position attend to those up to itself, one chunk of this rank after the other."""
    made, chunk = [], division.chunk
    for start, part in zip(division.starts, query.split(division.chunk, dim=-2)):
        end = min(start + chunk, division.length)
        rows = end - start
        if rows < 1:  # All of it is padding, of which nothing is used; but the gradient has to reach the keys.
            made.append(_PLAIN(part, key, value, **options))
            continue
        own, keys, values = part[..., :rows, :], key[..., :end, :], value[..., :end, :]
        mask = _lower_right(rows, end, own, division) if start else None
        out = _PLAIN(own, keys, values, mask, 0.0, not start, **options)
        made.append(functional.pad(out, (0, 0, 0, chunk - rows)) if rows < chunk else out)
    return torch.cat(made, dim=-2)


def _gather_both(key: Tensor, value: Tensor, division: Division) -> tuple[Tensor, Tensor]:
    """Gather keys and values at once."""
    if key.shape[:-1] != value.shape[:-1] or key.dtype != value.dtype:
        return division.gather(key, -2), division.gather(value, -2)
    sizes = [key.shape[-1], value.shape[-1]]
    whole_key, whole_value = division.gather(torch.cat([key, value], -1), -2).split(sizes, dim=-1)
    return whole_key, whole_value


def _lower_right(rows: int, columns: int, query: Tensor, division: Division) -> Any:
    """Return the mask in which the last query attends to all keys; a GPU has kernels that do not need its elements."""
    if query.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(rows, columns)
    return division.mask(columns - rows, query.dtype, query.device)[:rows, :columns]
