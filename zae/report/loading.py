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
            break
    return names


def load_run(path: Path, name: str, others: Sequence[Path] = ()) -> Run:
    """Read what a folder, or a log, tells about a run; ConfigError where there is nothing.

    The checkpoints in folders of ``others`` are not those of this run.
    """
    from zae.doctor.checkpoints import examine  # It imports torch, which takes seconds: not for --help.
    from zae.report.records import Run, find_log, read_log

    if not path.exists():
        raise ConfigError(f"{path} does not exist; give the folder of a run, or its log")
    log = path if path.is_file() else find_log(path)
    records = None if log is None else read_log(log)
    folders = _folders_of_checkpoints(path, records, others)
    if records is None and len(folders) > 1:
        names = " ".join(map(str, folders[:9]))
        raise ConfigError(f"{path} contains {len(folders)} runs; give the ones that you mean: {names}")
    if records is None and not folders:
        raise ConfigError(
            f"{path} contains neither a log nor checkpoints; give the folder of a run, or the file of JSON lines that "
            "JSONLLoggerAddon(jsonl_path=...) wrote"
        )
    reports = [examine(folder) for folder in folders]
    intact = ((report, checkpoint) for report in reports for checkpoint in report["checkpoints"] if checkpoint["whole"])
    newest = next(intact, None)
    if records is None:
        records = _records_in(newest)
    return Run(name, records, reports, newest[1]["composition"] if newest else [])


def _folders_of_checkpoints(path: Path, records: Records | None, others: Sequence[Path]) -> list[Path]:
    """Return a folder with checkpoints, or those in it that have some, or that of which a log says so."""
    from zae.checkpoint.folder import list_checkpoints

    def has_checkpoints(folder: Path) -> bool:
        return folder.is_dir() and bool((folder / "manifest.json").exists() or list_checkpoints(folder))

    if has_checkpoints(path):
        return [path]
    if path.is_dir():
        folders = sorted(folder for folder in path.iterdir() if not folder.is_symlink())
    else:
        saved = records.description_of("config").get("save_path") if records is not None else None
        folders = [Path(saved), path.parent / saved] if isinstance(saved, str) and saved else []
    return [*dict.fromkeys(folder.absolute() for folder in folders if folder not in others and has_checkpoints(folder))]


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
