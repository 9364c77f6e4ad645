"""Compare what a script gives a run with what the run was given that it continues."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zae.compose.introspect import slots_of
from zae.errors import CheckpointMismatch, printable
from zae.record import parts
from zae.values.redact import redact

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["REMEDY", "RunRecord"]

_log = logging.getLogger("zae")
REMEDY = (
    "begin a new run from parts of it: start_from=PATH, start_with=('model', 'optimizer'), options of StateManagerAddon"
)
MAX_SHOWN = 10
MAX_TEXT = 60
_HASH = re.compile(r" [0-9a-f]{16}$")
_ENDS = ("n_epoch", "max_steps", "valid_loader")
"""Arguments of ``run`` that say where it ends: a run may be made longer."""

_PARTS_OF_CALL = ("settings", "samples")
_OF_CHECKPOINT = ("optimizer ", "scheduler ", "seed")
"""What the names of settings begin with that a checkpoint overrides; of all others the script's count."""


class RunRecord:
    """What the script has given this process, and what the run was given whose state was loaded.

    It is read as the script made it: before a state is loaded, and before training changes it. Secrets are left out.
    """

    def __init__(self) -> None:
        self._script: parts.Record = {}
        self._objects: dict[str, Any] = {}  # The optimizers and schedules that were read, by their names.
        self._in_use: parts.Record = {}  # The settings of optimizers and schedules that a state has brought.
        self._calls: dict[int, parts.Record] = {}  # Of each call of run, its arguments and data.
        self._loaded: parts.Record | None = None  # What was loaded and not compared yet.
        self._loaded_calls: dict[int, parts.Record] = {}
        self._calls_in_state = 0
        self._call: tuple[int, parts.Record] = (-1, {})

    # --------------------------------------------------------------------------------------------------- reading

    def note_script(self, trainer: Trainer) -> None:
        """Read the options, the model and the code, once; and optimizers and schedules that are new."""
        record: parts.Record = {}
        if not self._script:
            record = {**parts.of_options(trainer), **parts.of_model(trainer.unwrap()), **parts.of_code(trainer)}
        for kind, several, read in (
            ("optimizer", trainer.optimizers, parts.of_optimizers),
            ("scheduler", trainer.schedulers, parts.of_schedules),
        ):
            for name, entry in several.items():
                key = f"{kind} {name}"
                if self._objects.get(key) is not entry:
                    self._objects[key] = entry
                    self._script = _without(self._script, [key])
                    self._in_use = _without(self._in_use, [key])
                    record |= read({name: entry})
        if record:
            self._script = self._script | redact(record)

    def note_call(self, run: Run) -> None:
        """Read the arguments and the data of a call of ``run`` that begins; the data only where a state is saved."""
        call = {name: value for name, value in parts.of_call(run).items() if name not in _ENDS}
        record = {"settings": call | parts.of_loader(run.loader, "loader"), "samples": {}}
        if "state" in slots_of(type(run.trainer)):
            record["settings"] |= parts.of_dataset(run.loader, "loader")
            record["samples"] = parts.of_samples(run.loader, "loader")
        number = run.trainer.progress_checker.run_calls.index
        self._call = (number, redact(record))

    # ------------------------------------------------------------------------------------------------- the state

    def state_dict(self) -> dict[str, Any]:
        """Return what this run was given; of optimizers and schedules, the settings in use."""
        calls = dict(self._calls)
        number, record = self._call
        calls.setdefault(number, record)
        changed = []
        last: Any = None
        for index in sorted(calls):
            if index >= 0 and calls[index] != last:
                last = calls[index]
                changed.append([index, last])
        return {"script": self._script | self._in_use, "calls": changed}

    def check_classes(self, records: Mapping[str, Any]) -> None:
        """Refuse the state of a trainer whose optimizers or schedules are of other classes."""
        saved = _classes_in(records)
        for key in self._objects:
            before = _class_of(saved, key)
            now = _class_of(self._script, key)
            if before and before != now and not ("settings" in records and now.startswith(f"{before}(")):
                raise CheckpointMismatch(
                    f"{key} was saved by {printable(before)}, and is {now} here; build it as it was, or {REMEDY}"
                )

    def load_state_dict(self, records: Mapping[str, Any], calls_in_state: int) -> None:
        """Take what the run was given whose state is loaded; a state of an older version does not have it."""
        self._calls_in_state = calls_in_state
        saved = records.get("run")
        if saved is None:
            return
        script = dict(saved["script"])
        calls = {int(number): {key: dict(record[key]) for key in _PARTS_OF_CALL} for number, record in saved["calls"]}
        self._loaded = script
        self._loaded_calls = calls
        self._calls = dict(calls)
        self._in_use = {key: script[key] for key in self._script if key.startswith(_OF_CHECKPOINT) and key in script}

    # ----------------------------------------------------------------------------------------------- comparisons

    def compare(self, run: Run) -> None:
        """Warn, once for a load and for each call of ``run``, of what differs; refuse other data within an epoch."""
        number, record = self._call
        before = max((index for index in self._loaded_calls if index <= number), default=None)
        saved = {} if before is None else self._loaded_calls[before]
        progress = run.trainer.progress_checker
        is_repeated = bool(saved) and number < self._calls_in_state
        is_over = is_repeated and not progress.pending_validation and not run.has_more_epochs()
        texts = self._differences_of_script()
        if is_repeated:
            settings = _differences(saved["settings"], record["settings"])
            data = _differences(saved["samples"], record["samples"])
            if data and not is_over and progress.epoch_batch:
                raise CheckpointMismatch(_explain_other_data(data))
            if is_over and data | settings:
                texts.append(_explain_finished(data | settings))
            elif not is_over:
                texts += [_explain_new_data(data)] if data else []
                texts += [_explain_script(settings)] if settings else []
        self._calls[number] = saved if is_over else record
        if texts and run.trainer.is_main:
            _log.warning("%s", printable(" ".join(texts)))

    def _differences_of_script(self) -> list[str]:
        """Return sentences on what differs between the script and the state that was loaded, once."""
        if self._loaded is None:
            return []
        differences = _differences(self._loaded, self._script)
        self._loaded = None
        code = [name for name in differences if name.startswith("code of ")]
        overridden = {name: change for name, change in differences.items() if name.startswith(_OF_CHECKPOINT)}
        functions = {name: overridden.pop(name) for name in [*overridden] if name.endswith(": lr_lambdas")}
        others = {name: change for name, change in differences.items() if name not in (*code, *overridden)} | functions
        texts = []
        if overridden:
            texts.append(
                f"the checkpoint overrides settings of this script ({len(overridden)}): {_listed(overridden)}. The "
                f"checkpoint's values are used; to use the script's, {REMEDY}."
            )
        if others:
            texts.append(_explain_script(others))
        if code:
            names = ", ".join(name.removeprefix("code of ") for name in code)
            texts.append(f"the code of {names} has changed since the checkpoint was saved; the run goes on with it.")
        return texts


def _differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that both have and that differ, the saved one first."""
    pairs = {name: (saved[name], present[name]) for name in present if name in saved}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and repr(pair[0]) != repr(pair[1])}


def _listed(differences: Mapping[str, tuple[Any, Any]]) -> str:
    shown = [
        f"{name}={present!r} in the script and {saved!r} in the checkpoint"
        for name, (saved, present) in list(differences.items())[:MAX_SHOWN]
    ]
    return "; ".join(shown) + ("; ..." if len(differences) > MAX_SHOWN else "")


def _explain_script(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return (
        f"the script has changed since the checkpoint was saved ({len(differences)}): {_listed(differences)}. The "
        "script's values are used from here on."
    )


def _named(data: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the names of what differs of the data, with both values where they are numbers."""
    texts = []
    for name, (saved, present) in list(data.items())[:MAX_SHOWN]:
        is_hash = isinstance(present, str) and _HASH.search(present) is not None
        texts.append(name if is_hash or len(repr(present)) > MAX_TEXT else f"{name} (was {saved!r} and is {present!r})")
    return ", ".join(texts)


def _explain_other_data(data: Mapping[str, tuple[Any, Any]]) -> str:
    return (
        f"the state was saved within an epoch over other data: {_named(data)} differ. Some samples would be used "
        "twice, and others never. Build the dataset as it was, with the same seed where it is drawn at random; write "
        "mid_epoch='restart' (an option of StateManagerAddon) to begin the epoch again; or give each run its own "
        "save_path"
    )


def _explain_new_data(data: Mapping[str, tuple[Any, Any]]) -> str:
    return (
        f"the run was begun with other data: {_named(data)} differ. It goes on with those of this script; if it is "
        "another run, give each run its own save_path."
    )


def _explain_finished(data: Mapping[str, tuple[Any, Any]]) -> str:
    return (
        f"this run is already finished, and was given something else: {_named(data)}. Nothing is trained on it, and "
        "the weights are those of the run that is there; give each run its own save_path, or write overwrite=True to "
        "begin again."
    )


def _without(record: Mapping[str, Any], owners: Iterable[str]) -> parts.Record:
    """Return a record without the settings of some optimizers or schedules."""
    return {
        name: value
        for name, value in record.items()
        if not any(name == owner or name.startswith((f"{owner}:", f"{owner},")) for owner in owners)
    }


def _classes_in(records: Mapping[str, Any]) -> parts.Record:
    """Return the records of a state that have the classes among them; those of an older version had other names."""
    if "run" in records:
        script: parts.Record = records["run"]["script"]
        return script
    classes = {}
    for part, by_name in records.get("settings", {}).items():
        for name, description in by_name.items():
            classes[f"{part} {name}"] = str(description["class"])
    return classes


def _class_of(record: Mapping[str, Any], key: str) -> str:
    """Return the class of an optimizer or a schedule with the classes of its parts."""
    inner: list[str] = []
    while (part := f"{key}, part {len(inner)}") in record:
        inner.append(_class_of(record, part))
    return str(record.get(key, "")) + (f"({', '.join(inner)})" if inner else "")
