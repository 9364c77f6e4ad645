"""Numbers of a state that cannot be: counters below 0 or ahead of each other, rates that are not numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor

from zae.errors import CheckpointMismatch

__all__ = ["check_counters", "check_manifest", "check_rates"]

_LARGEST = 2**63 - 1
# The counts of the open epoch are not among them: another batch size, with reshard=True, counts them anew.
_NEVER_MORE = (("epoch", "batch"), ("step", "batch"), ("skipped_steps", "step"))
_RATES = ("lr", "initial_lr", "base_lrs", "_last_lr", "max_lr", "min_lr")


def check_counters(counters: Mapping[str, Any]) -> None:
    """Refuse the progress of a run that cannot have been.

    Parameters
    ----------
    counters : mapping
        What ``ProgressChecker.state_dict`` returned.

    Raises
    ------
    CheckpointMismatch
        A counter is not a whole number from 0, or is ahead of one that it is a part of.

    Examples
    --------
    >>> check_counters({"epoch": 9, "batch": 4})
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointMismatch: the progress in the state is not one that zae has saved (epoch=9 is more than \
batch=4); nothing was loaded: take another checkpoint
    """
    fault = ""
    for name, value in counters.items():
        if name not in ("run_starts", "stop_reason") and not (type(value) is int and 0 <= value <= _LARGEST):
            fault = f"{name}={value!r:.40} is not a whole number from 0"
    for part, whole in _NEVER_MORE:
        if not fault and counters.get(part, 0) > counters.get(whole, _LARGEST):
            fault = f"{part}={counters[part]} is more than {whole}={counters[whole]}"
    reason = counters.get("stop_reason")
    if not fault and not (reason is None or isinstance(reason, str)):
        fault = f"stop_reason={reason!r:.40} is not text"
    before = [0, 0]
    for start in counters.get("run_starts", ()) if not fault else ():
        now = [counters.get("epoch", 0), counters.get("step", 0)]
        numbers = list(start) if isinstance(start, (list, tuple)) else []
        is_pair = len(numbers) == 2 and all(type(number) is int for number in numbers)
        if not is_pair or not all(a <= b <= c for a, b, c in zip(before, numbers, now, strict=True)):
            fault = f"a call of run began at {start!r:.40}, and the state is of epoch and step {now}"
            break
        before = numbers
    if fault:
        raise CheckpointMismatch(
            f"the progress in the state is not one that zae has saved ({fault}); nothing was loaded: take another "
            "checkpoint"
        )


def check_manifest(found: Path, manifest: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose state is of another step or epoch than its manifest says.

    Parameters
    ----------
    found : Path
        The checkpoint.
    manifest, state : mapping
        What it holds.

    Raises
    ------
    CheckpointMismatch
        With both numbers.

    Examples
    --------
    >>> check_manifest(Path("step-00000012"), {"step": 12, "epoch": 1}, {"progress": {"step": 12, "epoch": 1}})
    """
    progress = state.get("progress")
    if not isinstance(progress, Mapping):
        return
    for name in ("step", "epoch"):
        if progress.get(name) != manifest[name]:
            raise CheckpointMismatch(
                f"{found}: the manifest says {name} {manifest[name]}, and the state {name} "
                f"{progress.get(name)!r:.40}; somebody has changed it: load another checkpoint"
            )


def check_rates(what: str, saved: Any, present: Any) -> None:
    """Refuse text, NaN and the like where an optimizer or a scheduler has a number.

    Parameters
    ----------
    what : str
        What to call it in a message.
    saved, present : object
        What was saved, and what there is now: the values of a parameter group or of a scheduler's state by name.

    Raises
    ------
    CheckpointMismatch
        With the name and the value.

    Examples
    --------
    >>> check_rates("optimizer", {"lr": "0.1"}, {"lr": 0.1})
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointMismatch: the state of the optimizer has lr='0.1', which is not a number; load another \
checkpoint
    """
    for name in (saved.keys() & present.keys()) - {"params"}:  # A parameter may be lazy.
        value, is_rate = saved[name], name in _RATES
        several = isinstance(present[name], (list, tuple)) and isinstance(value, (list, tuple))
        for old, new in zip(value, present[name]) if several else [(value, present[name])]:
            if _is_number(new) and not _is_number(old):
                raise _refusal(what, name, value, "a number")
            if is_rate and _is_number(old) and not (math.isfinite(float(old)) and float(old) >= 0):
                raise _refusal(what, name, value, "a rate")


def _is_number(value: object) -> bool:
    """Say whether a value is a number, also one in a tensor."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _refusal(what: str, name: str, value: object, kind: str) -> CheckpointMismatch:
    """Return the error for one value."""
    return CheckpointMismatch(
        f"the state of the {what} has {name}={value!r:.60}, which is not {kind}; load another checkpoint"
    )
