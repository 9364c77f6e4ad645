"""The trainer of the script as the replay needs it: without loggers, with a ledger, writing to a temporary folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zae import script
from zae.addons.state_manager.checkpointer import FolderCheckpointer
from zae.checkpoint.filesystem import original_name, step_of
from zae.checkpoint.folder import list_checkpoints, load_checkpoint
from zae.compose.composition import load_installed
from zae.compose.introspect import add_ons_of, traits_of, with_trait
from zae.compose.options import options_of
from zae.errors import CheckpointDamaged, ConfigError
from zae.loop.progress import Every
from zae.replay.observe import Replay, ReplayAddon

__all__ = ["Request", "making"]

_OTHER_STEPS = ("keeps_gradients", "divides_batches")  # Traits of engines whose steps have other parts.


class Request(NamedTuple):
    """What is to be replayed: the steps of the run of a script's trainer, and what to begin and to compare with.

    ``given`` are the arguments of the script; with ``prints_aside`` what it prints goes to standard error.
    """

    script: str
    step: int
    to: int
    given: tuple[str, ...] = ()
    checkpoint: str | None = None
    ledger: str | None = None
    prints_aside: bool = False


@contextlib.contextmanager
def making(request: Request, folder: Path) -> Iterator[dict[str, Any]]:
    """Let the script make its trainer as the replay needs it; what was found out is in the dict that is yielded."""
    made = dict[str, Any]()

    def make(original: Any, cls: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = cls.expand_options(named)
        made.clear()
        made.update(_plan(cls, given, request))
        variant = _variant(cls, made["plan"])
        made["trainer"] = original(variant, *args, **_options(cls, variant, given, made, folder))
        return made["trainer"]

    with script.making(make):
        yield made


def _plan(cls: Any, given: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return what to look at, and where to begin."""
    gone = frozenset(kind.__name__ for each in add_ons_of(cls) if _is_left_out(each) for kind in each.__mro__)
    plan = Replay(request.step, request.to, gone, raises=given.get("on_nonfinite", "raise") == "raise")
    checkpoint, notes = _checkpoint(request, given)
    if checkpoint is None and given.get("seed") is None:
        notes.append("the trainer has no seed: from its beginning, the replay is another run")
    where = None if checkpoint is None else str(checkpoint)
    return {"plan": plan, "checkpoint": where, "notes": notes, "ledger": given.get("ledger_path")}


def _checkpoint(request: Request, given: Mapping[str, Any]) -> tuple[Path | None, list[str]]:
    """Return the nearest whole checkpoint before the step; None where there is none."""
    if request.checkpoint is not None:
        return Path(request.checkpoint), []
    if given.get("checkpointer", FolderCheckpointer) is not FolderCheckpointer:
        raise ConfigError(
            "the checkpoints of this run are not in a folder; copy the one to begin with into a folder, "
            "and give it: --from FOLDER"
        )
    if given.get("save_path") is None:
        return None, ["the trainer has no save_path, and thus no checkpoint to begin with"]
    saved = list_checkpoints(given["save_path"])
    notes: list[str] = []
    for path in saved:  # The highest step first.
        step = step_of(original_name(path.name))
        if step is None or step >= request.step:
            continue
        try:
            load_checkpoint(path)
        except CheckpointDamaged as error:
            notes.append(f"passed over {path}: {error}")
        else:
            return path, notes
    return None, [*notes, f"{given['save_path']} has no checkpoint before step {request.step}"]


def _is_left_out(add_on: Any) -> bool:
    """Return whether an add-on only writes down what a run does."""
    is_observer = add_on.layer == "observe" and add_on.__module__.startswith("zae.")
    return is_observer and "changes_run" not in traits_of(add_on)


def _variant(cls: Any, plan: Replay) -> Any:
    """Return the class without its loggers, with a ledger, and with what looks at the steps."""
    engine = with_trait(cls, *_OTHER_STEPS)
    if engine is not None:
        name = engine.__name__
        raise ConfigError(f"the trainer has {name}, whose engine computes the steps: a replay cannot look at one")
    ReplayAddon.replay = plan
    ledger = load_installed("LedgerAddon")
    gone = [each for each in add_ons_of(cls) if _is_left_out(each)]
    return script.variant(cls, [each for each in gone if each is not ledger], [ledger, ReplayAddon])


def _options(cls: Any, variant: Any, given: Mapping[str, Any], made: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options of the trainer: what it writes lies in a folder of the replay."""
    known, found = options_of(variant), script.options_for(variant, cls, given)
    script.redirect(found, lambda option, file: folder / option / file)
    found |= {"ledger_path": folder / "replay.jsonl", "ledger_every": 1}
    if "save_path" in known:
        found |= {
            "resume": made["checkpoint"] or False,
            "save_every": Every(steps=2**62),
            "keep_weights": None,
            "save_weights_every": None,
            "save_on_signal": False,
        }
        if made["checkpoint"]:
            found |= {"start_from": None, "start_with": None}
    elif made["checkpoint"]:
        raise ConfigError("--from needs a trainer with StateManagerAddon, which reads the checkpoint")
    if made["plan"].raises:
        found["on_nonfinite"] = "warn"  # ReplayAddon says from which step on.
    return {**found, "log_bar": False}
