"""Compare what two runs have left: the first step, and the first part, in which they differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from zae.compose.options import join
from zae.testing.watch import difference, shared_entries

__all__ = ["as_plain", "first_difference", "largest", "update_difference"]

_SEEN = ("loss", "weights", "random streams")  # Of each step.


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], without: Collection[str] = (), may_add: bool = False
) -> str:
    """Return where two runs of the trainer differ, empty where they do not.

    ``without`` names parts that are not compared. With ``may_add``, the history of ``other`` may have more metrics.
    """
    steps = {row["step"] + row["skipped"]: row for row in one["steps"]}
    for row in other["steps"]:
        known = steps.get(row["step"] + row["skipped"])
        names = [name for name in _SEEN if name not in without and known is not None and known[name] != row[name]]
        if names:
            values = f" (loss {known['loss']} and {row['loss']})" if known and "loss" in names else ""
            return f"{join(names)} differ first in step {row['step']}{values}"
    for name, value in one["parts"].items():
        if name in without or name not in other["parts"]:
            continue
        found = other["parts"][name]
        if may_add and name.endswith("history"):
            found = shared_entries(found, value)
        where = difference(value, found, name)
        if where is not None:
            return f"{where} differs at the end"
    return ""


def update_difference(zae: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Return where the loop by hand differs from the composition, empty where it does not."""
    where = difference(zae["weights"], plain["weights"], "weights")
    if where is None:
        return ""
    pairs = zip(zae["updates"], plain["updates"])
    step = next((index for index, (a, b) in enumerate(pairs, start=1) if a != b), None)
    when = f"; the weights differ first after call {step} of an optimizer" if step else ""
    when = when or f"; {len(zae['updates'])} calls of an optimizer, and {len(plain['updates'])} by hand"
    return f"{where} differs at the end{when}"


def largest(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest difference of two dicts of tensors, as a share of the largest entry, and the name."""
    found = (0.0, "")
    for name, value in one.items():
        if name not in other or value.shape != other[name].shape:
            return float("inf"), name
        if value.numel():
            a, b = value.double(), other[name].double()
            share = float((a - b).abs().max() / max(float(a.abs().max()), 1e-30))
            found = max(found, (share if share == share else float("inf"), name))
    return found


def as_plain(value: Any) -> Any:
    """Return a nested value of tensors, numbers, text, lists and dicts; anything else as text."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key if isinstance(key, (str, int)) else str(key): as_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(each) for each in value]
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)
