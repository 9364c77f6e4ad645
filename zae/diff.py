"""Compare the ledgers of two runs: the first step and stage at which they differ."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zae.display.answer import Answer
from zae.errors import ConfigError, printable

__all__ = ["STAGES", "Difference", "compare", "describe", "diff", "first_tensors", "read_ledger"]

STAGES = ("batch", "forward", "backward", "clip", "step")
"""The parts of a step in the order in which they happen."""

_NAMES = {
    "data": "the samples of the batch (or the hash of its content) differ",
    "content": "the content of the batch differs (a value or a label of these samples)",
    "random": "the random state differs",
    "loss": "the loss differs",
    "gradients": "the gradients differ",
    "norm": "the norm of the gradients differs",
    "lr": "the learning rate differs",
    "settings": "the settings of the optimizer differ",
    "stepped": "the optimizer stepped in one of the runs only",
    "weights": "the weights differ",
}
_TENSORS = {"batch": "a weight has changed between two steps", "step": "the state of an optimizer differs"}


_ALIKE = ("gradients", "norm", "lr", "settings", "stepped", "weights", "tensors")
"""What two ranks of one run have in common; their batches, losses and random streams differ."""


_BY_PART = ("gradients", "weights")
"""What a rank of a sharded model writes for each part of the tensors that it holds."""


MAX_TENSORS = 12  # Tensors that are listed; --json has all of them.


class Difference(NamedTuple):
    """The first difference of two runs: the stage of a step, what differs, and both values."""

    step: int
    stage: str
    what: str
    first: Any
    second: Any


def read_ledger(path: str | Path) -> dict[int, dict[str, Any]]:
    """Return the last entry of each step of a ledger file, or of the ``ledger.jsonl`` in a folder."""
    path = Path(path)
    file = path / "ledger.jsonl" if path.is_dir() else path
    try:
        if file.exists() and not file.is_file():  # Reading a pipe would block.
            raise OSError(errno.EINVAL, "not a plain file")
        lines = file.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path} contains no ledger ({error.strerror}); give the file that LedgerAddon wrote, or the folder of a "
            "run with a ledger.jsonl in it"
        ) from None
    entries: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if "ledger" in entry:
                if entry["begins_after"] == 0:
                    entries.clear()
                continue
            if not 0 <= (step := int(entry["step"])) < 2**63:  # Larger ones may collide as keys.
                raise ValueError
            entries[step] = {**entry, "stages": dict(entry["stages"])}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if number == len(lines) or (line[:1] == "{" and lines[number].startswith('{"ledger"')):
                continue  # A killed run leaves half a line; the resumed run begins a new one.
            raise ConfigError(
                f"{file}, line {number} is not a line of a ledger: {line:.60}; give a file that LedgerAddon wrote"
            ) from None
    return entries


def compare(first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]]) -> Difference | None:
    """Find the first step and stage at which two ledgers differ; of two ranks, in what ranks have in common."""
    for step in sorted(first.keys() & second.keys()):
        are_ranks = first[step].get("rank") != second[step].get("rank")
        for stage in STAGES:
            a = first[step]["stages"].get(stage, {})
            b = second[step]["stages"].get(stage, {})
            # An older ledger lacks some entries of a stage; a stage that only one of them has is a difference.
            names = [part for part in a if part in b] if a and b else [*a, *b]
            if are_ranks:
                names = [part for part in names if part in _ALIKE]
            for part in names:
                values = _compared(part, a.get(part), b.get(part), are_ranks)
                if repr(values[0]) != repr(values[1]):  # NaN equals NaN.
                    return Difference(step, stage, part, *values)
    return None


def _compared(part: str, first: Any, second: Any, are_ranks: bool) -> tuple[Any, Any]:
    """Return two entries as they are compared: of ranks the parts that both hold, of tensors those that differ."""
    if are_ranks and part in _BY_PART:
        return _common_parts(first, second)
    if part == "tensors" and first and second:
        return _differing(first, second)
    return first, second


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[Any, Any]:
    """Return the hashes that differ."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return {name: first.get(name) for name in names}, {name: second.get(name) for name in names}


def _common_parts(first: Any, second: Any) -> tuple[Any, Any]:
    """Return the hashes of what both ranks hold, where each has written one for each part."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first, second
    parts = [part for part in first if part in second]
    return {part: first[part] for part in parts}, {part: second[part] for part in parts}


def diff(one: Path, other: Path, *, by_tensor: bool = False) -> Answer:
    """Return the first difference of two runs; the status is 1 if there is one."""
    first, second = read_ledger(one), read_ledger(other)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ConfigError(
            f"no step is in both ledgers ({len(first)} and {len(second)} steps); write them with the same ledger_every="
        )
    difference = compare(first, second)
    ends = max(first), max(second)
    is_same = difference is None and ends[0] == ends[1]
    data: dict[str, Any] = {"same": is_same, "compared": len(common), "ends": ends}
    if by_tensor:
        _require_tensors(one, first)
        _require_tensors(other, second)
    if difference is not None:
        text = describe(difference, common)
        if by_tensor:
            data["tensors"] = tensors = first_tensors(first[difference.step], second[difference.step])
            text += f"\n{_describe_tensors(tensors)}"
        return Answer({**data, **difference._asdict()}, text, 1)
    longer = "" if is_same else f"; runA ends at step {ends[0]}, runB at step {ends[1]}"
    text = f"the same in all {len(common)} common steps, up to step {common[-1]}{longer}"
    return Answer(data, text, 0 if is_same else 1)


def _require_tensors(path: Path, ledger: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse a ledger without hashes of single tensors."""
    if not any("tensors" in stage for entry in ledger.values() for stage in entry["stages"].values()):
        raise ConfigError(
            f"{path} has no hashes of single tensors; write the ledgers with ledger_tensors=True, an option of "
            "LedgerAddon (of a sharded model, without {rank} in ledger_path)"
        )


def first_tensors(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, str]]:
    """List the tensors that differ in the first stage of a step in which any does, in the order of the stage."""
    for stage in STAGES:
        stage_a = first["stages"].get(stage, {})
        stage_b = second["stages"].get(stage, {})
        batches = _differing_batches(stage_a.get("content", []), stage_b.get("content", []))
        if batches and first.get("rank") == second.get("rank"):
            return [{"stage": stage, "kind": "batch", "name": name} for name in batches]
        if stage_a.get("tensors") and stage_b.get("tensors"):
            hashes, _ = _differing(stage_a["tensors"], stage_b["tensors"])
            if hashes:
                kinds = [name.partition(":") for name in hashes]
                return [{"stage": stage, "kind": kind, "name": name} for kind, _, name in kinds]
    return []


def _differing_batches(first: list[list[str]], second: list[list[str]]) -> list[str]:
    """Return the tensors of the batches of a window that differ, each as "batch.tensor"."""
    batches = []
    for micro, (tensors, other_tensors) in enumerate(zip(first, second)):
        batches += [f"{micro}.{index}" for index, (a, b) in enumerate(zip(tensors, other_tensors)) if a != b]
    return batches


def _describe_tensors(differences: list[dict[str, str]]) -> str:
    """Name the tensors that differ first."""
    if not differences:
        return "no tensor differs in this step; look at the next one that differs"
    place = {
        "batch": "before the step",
        "backward": "after the backward",
        "clip": "after the clip",
        "step": "after the step",
    }[differences[0]["stage"]]
    kinds = {
        "weight": "weight {}",
        "gradient": "gradient of {}",
        "batch": "tensor {} of the batch (batch of the window, tensor)",
    }
    names = [
        printable(kinds.get(difference["kind"], "{kind} of {name}").format(difference["name"], **difference))
        for difference in differences
    ]
    text = f"  the first tensor that differs, {place}: {names[0]}"
    if len(names) > 1:
        text += f"; {len(names)} differ there: {', '.join(names[:MAX_TENSORS])}"
    return f"{text}, and {len(names) - MAX_TENSORS} more" if len(names) > MAX_TENSORS else text


def describe(difference: Difference, common: list[int]) -> str:
    """Describe a difference in words."""
    before = [step for step in common if step < difference.step]
    agreement = f"the same up to step {before[-1]}" if before else "the first step that was compared"
    if before and difference.step - before[-1] > 1:
        agreement += f", {difference.step - before[-1] - 1} steps between were not recorded"
    if difference.what == "tensors":
        sentence = _TENSORS.get(difference.stage, "a gradient differs")
    else:
        sentence = _NAMES.get(difference.what) or f"{printable(difference.what)} differs"
    return (
        f"the runs differ at step {difference.step}, in the stage {difference.stage!r}: {sentence} "
        f"({agreement})\n  runA: {_short(difference.first)}\n  runB: {_short(difference.second)}"
    )


def _short(value: Any) -> str:
    text = "nothing recorded" if value is None else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."
