"""Read what is known of runs: their logs, and what doctor says of their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zae.errors import ConfigError

if TYPE_CHECKING:
    from zae.report.records import Records, Run

__all__ = ["load_run", "names_of"]


def names_of(paths: list[Path]) -> list[str]:
    """Name each path by as many of its last parts as tell them apart."""
    parts = [path.absolute().with_suffix("" if path.is_file() else path.suffix).parts for path in paths]
    names: list[str] = []
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def load_run(path: Path, name: str, others: Sequence[Path] = ()) -> Run:
    """Read what a folder, or a log, tells about a run; ConfigError where there is nothing.

    The checkpoints in folders of ``others`` are not those of this run.
    """
    from zae.report.records import Run, find_log, read_log

    if not path.exists():
        raise ConfigError(f"{path} does not exist; give the folder of a run, or its log")
    log = path if path.is_file() else find_log(path)
    if log is None:
        path = _only_run_in(path)
        log = find_log(path)
    records = None if log is None else read_log(log)
    reports = _examine_all(path, records, others)
    if records is None and not reports:
        raise ConfigError(
            f"{path} contains neither a log nor checkpoints; give the folder of a run, or the file of JSON lines that "
            "JSONLLoggerAddon(jsonl_path=...) wrote"
        )
    intact = ((report, checkpoint) for report in reports for checkpoint in report["checkpoints"] if checkpoint["whole"])
    newest = next(intact, None)
    if records is None:
        records = _records_in(newest)
    return Run(name, records, reports, newest[1]["composition"] if newest else [])


def _only_run_in(folder: Path) -> Path:
    """Return a folder without a log, or the folder in it that has the one run; ConfigError where there are several."""
    from zae.checkpoint.folder import list_checkpoints
    from zae.report.records import find_log

    if (folder / "manifest.json").exists() or list_checkpoints(folder):
        return folder
    near = sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())
    logged = [path for path in near if find_log(path) is not None]
    runs = [path for path in near if path in logged or list_checkpoints(path)]
    if len(runs) > 1:
        names = " ".join(str(run) for run in runs[:9])
        raise ConfigError(f"{folder} contains {len(runs)} runs; give the ones that you mean: {names}")
    return logged[0] if logged else folder


def _examine_all(path: Path, records: Records | None, others: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what doctor reports of the checkpoints in a folder and in those in it, or where a log says they are."""
    from zae.checkpoint.folder import list_checkpoints
    from zae.doctor.checkpoints import examine  # It imports torch, which takes seconds: not for --help.

    if path.is_dir():
        folders = [path, *sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink())]
    else:
        saved = records.description_of("config").get("save_path") if records is not None else None
        folders = [Path(saved), path.parent / saved] if isinstance(saved, str) and saved else []
    folders = [
        candidate for candidate in folders if candidate.is_dir() and (candidate == path or candidate not in others)
    ]
    candidates = [
        candidate for candidate in folders if (candidate / "manifest.json").exists() or list_checkpoints(candidate)
    ]
    inner = {
        folder for folder in candidates if folder.parent in candidates
    }  # A checkpoint is not a folder of checkpoints.
    outer = dict.fromkeys(each.absolute() for each in candidates if each not in inner)
    return [examine(each) for each in outer]


def _records_in(newest: tuple[dict[str, Any], dict[str, Any]] | None) -> Records:
    """Return the records that a checkpoint contains: a run that was not logged has them there too."""
    from zae.checkpoint.reader import load_state
    from zae.report.records import Records

    if newest is None:
        return Records()
    folder = Path(newest[0]["path"])
    state = load_state(folder if folder.name == newest[1]["name"] else folder / newest[1]["name"])
    rows = state.get("records", {})
    return Records.of(rows.get("log_history", []) if isinstance(rows, dict) else [])
