"""Replay steps of a run: the run to the last step, the comparison with the ledger, and the answer."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zae import script
from zae.diff import compare, describe, read_ledger
from zae.display.answer import Answer
from zae.errors import ConfigError, ZaeError
from zae.replay.trainer import Request, making

__all__ = ["replay"]


def replay(request: Request) -> Answer:
    """Replay the steps, and show them."""
    if not 1 <= request.step <= request.to:
        raise ConfigError(f"--step {request.step} --to {request.to}; give a step of at least 1, and --to not before it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a replay is one process; start it without torchrun")
    folder = Path(tempfile.mkdtemp(prefix="zae-replay-"))
    try:
        made_by = script.trainer_of(request.script, request.given, prints_aside=request.prints_aside)
        with making(request, folder) as made, made_by as found:
            given = script.require_arguments(found, request.script)
            return _replay(request, found.trainer, given, made, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replay(request: Request, trainer: Any, given: Any, made: dict[str, Any], folder: Path) -> Answer:
    """Run to the last step, and compare."""
    _check(request, trainer, made)
    plan = made["plan"]
    failed = None
    log = logging.getLogger("zae")
    level = log.level
    log.setLevel(logging.ERROR)  # The warnings are about a step that the answer shows, or about temporary files.
    try:
        trainer.run(**{name: value for name, value in given.items() if name != "max_time"})
    except Exception as error:
        if not plan.rows and isinstance(error, ZaeError):
            raise
        failed = script.explain_failure(error)
    finally:
        log.setLevel(level)
    ledger = read_ledger(folder / "replay.jsonl") if (folder / "replay.jsonl").exists() else {}
    for row in plan.rows:
        row["samples"] = ledger[row["step"]]["stages"]["batch"]["data"] if row["step"] in ledger else None
    if not plan.rows and failed is None:
        raise ConfigError(f"the run ends at step {trainer.progress_checker.step}, before step {plan.first}")
    found = _compare(request, made, ledger)
    data = {
        "checkpoint": made["checkpoint"],
        "began_after": plan.began,
        "steps": plan.rows,
        **found["data"],
        "failed": failed,
        "notes": [*made["notes"], *plan.notes],
    }
    is_wrong = found["data"]["same"] is False or failed is not None or not all(row["is_finite"] for row in plan.rows)
    return Answer(data, _text(data, found["text"]), int(is_wrong))


def _check(request: Request, trainer: Any, made: dict[str, Any]) -> None:
    """Refuse a trainer that cannot be replayed."""
    if "trainer" not in made or made["trainer"] is not trainer:
        raise ConfigError(
            f"the trainer that {request.script} returned is not the last one that it made, while the "
            "function ran; make it in the function, after any other"
        )
    if trainer.mode == "test":
        raise ConfigError("the trainer has mode='test': there is nothing to replay")
    if len(trainer.devices) > 1:
        raise ConfigError(
            f"the trainer has {len(trainer.devices)} devices, and a replay is one process: the steps of "
            "a run of several ranks cannot be replayed"
        )


def _compare(request: Request, made: Mapping[str, Any], replayed: Mapping[int, Any]) -> dict[str, Any]:
    """Compare with the ledger of the run."""
    path = request.ledger or made["ledger"]
    if path is None or (request.ledger is None and not Path(path).exists()):
        return {"data": {"same": None, "compared": 0}, "text": "the run has no ledger to compare with"}
    known = read_ledger(path)
    both = sorted(known.keys() & replayed.keys())
    difference = compare(known, replayed)
    if difference is not None:
        text = describe(difference, both).replace("runA", "ledger").replace("runB", "replay")
    elif both:
        text = f"equal to the ledger in all {len(both)} steps that both have, up to step {max(both)}"
    else:
        text = "no step is compared with the ledger"
    return {"data": {"same": difference is None if both else None, "compared": len(both)}, "text": text}


# ------------------------------------------------------------------------------------------------------------- the text


def _text(data: Mapping[str, Any], compared: str) -> str:
    """Return the answer as text."""
    last = max([row["step"] for row in data["steps"]], default=data["began_after"])
    lines = [
        f"begins    after step {data['began_after']}: {data['checkpoint'] or 'the beginning of the run'}",
        f"replayed  {last - data['began_after']} steps, up to step {last}",
        f"compared  {compared}",
        *(f"note      {note}" for note in data["notes"]),
    ]
    for row in data["steps"]:
        lines += ["", *_step(row)]
    return "\n".join([*lines, *(["", "the run failed:", data["failed"]] if data["failed"] else [])])


def _step(row: Mapping[str, Any]) -> list[str]:
    """Return what happens in a step, as lines."""
    lines = [f"step {row['step']} (epoch {row['epoch']}, batch {row['batch']})"]
    if row["samples"] is not None:
        lines.append(f"  samples   {str(row['samples'])[:300]}")
    lines.append(f"  loss      {', '.join(map(str, row['losses']))}")
    if row["norm"] is not None:
        lines.append(f"  norm      {row['norm']:.6g}")
    lines += [f"  NOT FINITE: {each}" for each in _births(row)]
    width = max(map(len, [*row["outputs"], *row["gradients"], "(model)"]))
    if row["outputs"]:
        lines.append("  outputs of the modules, in the order in which they return: least and largest finite value")
    for name, each in row["outputs"].items():
        ends = f"  {_number(each['least'])}  {_number(each['largest'])}"
        bad = f"  {each['not_finite']} of {each['count']} not finite" if each["not_finite"] else ""
        lines.append(f"    {name or '(model)':<{width}}{ends}{bad}")
    lines.append("  norms of the gradients")
    return lines + [f"    {name:<{width}}  {_number(norm)}" for name, norm in row["gradients"].items()]


def _births(row: Mapping[str, Any]) -> list[str]:
    """Say where the first value that is not finite was made."""
    lines = []
    module = row["module"]
    if module is not None:
        inputs = "are finite" if module["finite_inputs"] else "are not"
        weights = "are finite" if module["finite_weights"] else "are not"
        lines.append(
            f"the first output is that of {module['name'] or '(model)'}, a {module['type']}; "
            f"its inputs {inputs}, its weights {weights}"
        )
    elif not row["is_finite"] and row["outputs"]:
        lines.append("the outputs of all modules are finite; it arises in train_step or in the backward")
    if row["gradient"] is not None:
        lines.append(f"the first gradient, in the order of the backward, is that of {row['gradient']}")
    return lines


def _number(value: float | None) -> str:
    """Format a value of a table; "-" where there is none."""
    return f"{'-':>12}" if value is None else f"{value:>12.6g}"
