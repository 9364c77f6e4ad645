"""Say what was found: as text, as JSON, and in Markdown."""

from __future__ import annotations

import json
import shlex
from typing import Any

from .check import Result
from .judge import FAILED, NOT_JUDGED, Judgement
from .saves import Save, general_name

__all__ = ["REMEDIES", "as_json", "as_markdown", "as_text"]

REMEDIES = {
    "random state": "save torch.get_rng_state() (and those of random, numpy and torch.cuda, where they draw) and set "
    "them after the load: at the begin of an epoch before the loader's iterator is made, which draws from them; within "
    "an epoch after it and the batches that are skipped",
    "samples": "save the epoch and the batches done, seed the order by the epoch (generator=, sampler.set_epoch) and "
    "skip what is done; or save the loader (torchdata's StatefulDataLoader)",
    "optimizer state": "save optimizer.state_dict() in the same file as the weights, and load it",
    "learning rate": "save scheduler.state_dict(), and load it after that of the optimizer",
    "loss scale": "save scaler.state_dict(), and load it",
    "buffers": "save the whole model.state_dict(), buffers included, and load it with strict=True",
    "weights": "save model.state_dict() of all that the optimizer trains, and load it before the first step",
    "gradients": "something else that the loss depends on is not saved (a target or averaged model, a queue, a "
    "counter, gradients of an accumulated step)",
    "other state": "something that the script keeps beside its model (a replay buffer, a queue, an averaged or best "
    "model) is not saved: save it",
    "two saves": "weights and optimizer lie in files that are replaced one after the other: put them into one file, or "
    "into a folder that is renamed to its place",
    "repeated work": "the file says that less is done than is: save the number of what is done, as epoch + 1",
    "skipped work": "the file says that more is done than is",
    "does not resume": "load the newest whole checkpoint when the script starts, or say how: "
    "--resume-with '--resume {newest}'",
    "lost work": "load the newest whole checkpoint (by its number, not by its name), and keep the old one until the "
    "new one is whole: write to another name, then os.replace",
    "cannot start": "what a killed run leaves is in the way (a lock, a folder): take it over when its process is gone",
    "cannot load": "write to another name and os.replace it to its place when it is whole, or skip a file that cannot "
    "be loaded",
    "saves nothing": "save model, optimizer, scheduler, random states and the position in the data, every some steps",
    "not saved at SIGTERM": "let the handler save before the process ends",
}
"""What to write, for each cause."""

_ENTRIES = {
    "random state": "random state",
    "optimizer state": "optimizer",
    "learning rate": "scheduler",
    "loss scale": "loss scale",
}


def as_text(result: Result) -> str:
    """Return the report."""
    head = f"resumecheck: {shlex.join(result.command)}: {result.steps} steps, {len(result.saves)} saves"
    lines = [head]
    if result.whole is not None:
        lines.append(f"  {_verdict(result.whole)}: {result.whole.message}")
    if result.saves:
        lines += _lines_of("a kill after a save", "step", result)
        lines += _lines_of("a kill in a save", "save", result)
    causes = [*result.causes("step"), *result.causes("save")]
    if result.whole is not None and result.whole.verdict == FAILED:
        causes.append(result.whole.cause)
    for cause in dict.fromkeys(causes):
        lines.append(f"  {cause}: {REMEDIES.get(cause, '')}".rstrip(": "))
    saved = describe_save(result)
    if saved and result.status == 1:
        lines.append(f"  saved: {saved}")
    for note in dict.fromkeys([*result.notes, *(note for judgement in result.judgements for note in judgement.notes)]):
        lines.append(f"  note: {note}")
    lines.append(
        "  not compared: metrics and logs, files of other programs, what comes after the horizon, what a power failure "
        "leaves of a file"
    )
    cost = f"{result.seconds:.0f} s, {result.cpu_seconds:.1f} s of the processor"
    lines.append(f"  {result.starts} starts and {result.forks} forks in {cost}")
    return "\n".join(lines)


def _verdict(judgement: Judgement) -> str:
    verdict = "FAILED" if judgement.verdict == FAILED else judgement.verdict
    return f"{verdict}: {judgement.cause}" if judgement.cause else verdict


def _lines_of(name: str, kind: str, result: Result) -> list[str]:
    """Return what was found at one kind of instants."""
    tried = [attempt for attempt in result.tried if attempt[0].kind == kind]
    if not tried:
        return [f"  {name}: not tried"]
    failed = [attempt for attempt in tried if attempt[1].verdict == FAILED]
    if not failed:
        first, judgement = tried[0]
        unjudged = [attempt for _, attempt in tried if attempt.verdict == NOT_JUDGED]
        verdict = _verdict(unjudged[0]) if unjudged else "the same"
        return [f"  {name}: {verdict} ({len(tried)} instants); {first.text}: {judgement.message}"]
    causes = result.causes(kind)
    if not causes:
        return [f"  {name}: as above ({len(failed)} of {len(tried)} instants)"]
    lines = [f"  {name}: FAILED at {len(failed)} of {len(tried)} instants"]
    seen = set()
    for instant, judgement in failed:
        mark = (judgement.cause, general_name(instant.text) if kind == "save" else "")
        if judgement.cause in causes and mark not in seen:
            lines.append(f"    {judgement.cause}: {instant.text}; {judgement.message}")
        seen.add(mark)
    return lines


def describe_save(result: Result) -> str:
    """Say which line saves what, and what is not in it."""
    if not result.saves:
        return ""
    save = result.saves[-1]
    lines: dict[str, list[str]] = {}
    kinds: set[str] = set()
    for event in save.events:
        holds = event.get("holds")
        if holds:
            entries = holds if isinstance(holds, dict) else {event["path"]: holds}
            kinds |= {str(entry) for entry in entries.values()}
            shown = [_entry(name, kind) for name, kind in entries.items()]
            lines.setdefault(event.get("line") or "?", []).append(", ".join(shown[:8]))
    text = "; ".join(f"{line} saves {', '.join(dict.fromkeys(entries))}" for line, entries in list(lines.items())[:4])
    cause = next((judgement.cause for judgement in result.judgements if judgement.verdict == FAILED), "")
    missing = _ENTRIES.get(cause)
    return f"{text}; no {missing} is seen in it" if text and missing and missing not in kinds else text


def _entry(name: str, kind: Any) -> str:
    return name if kind in (name, "number", "str", "dict", "list") else f"{name} ({kind})"


def as_dict(result: Result) -> dict[str, Any]:
    """Return the report as JSON takes it."""
    return {
        "command": result.command,
        "status": result.status,
        "steps": result.steps,
        "ranks": result.ranks,
        "saves": [_save_as_dict(save) for save in result.saves],
        "instants": result.instants,
        "whole": None if result.whole is None else vars(result.whole),
        "tried": [{"kind": i.kind, "instant": i.text, "done": i.done, **vars(j)} for i, j in result.tried],
        "notes": result.notes,
        "saved": describe_save(result),
        "seconds": round(result.seconds, 2),
        "cpu_seconds": round(result.cpu_seconds, 2),
        "starts": result.starts,
        "forks": result.forks,
    }


def _save_as_dict(save: Save) -> dict[str, Any]:
    return {"step": save.row, "is_known_by_weights": save.is_known_by_weights, "files": sorted(save.files)}


def as_json(result: Result) -> str:
    """Return the report as JSON."""
    return json.dumps(as_dict(result), indent=1)


def as_markdown(result: Result) -> str:
    """Return the report for a page such as a summary of GitHub Actions."""
    word = {0: "resumes to the same run", 1: "**does not resume to the same run**", 2: "could not be judged"}
    lines = [f"### `{shlex.join(result.command)}` {word[result.status]}", ""]
    if result.tried:
        lines += ["| instant | verdict | cause | what was found |", "|---|---|---|---|"]
        for instant, judgement in result.tried:
            cells = (instant.text, judgement.verdict, judgement.cause, judgement.message)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join([*lines, "```text", as_text(result), "```", ""])
