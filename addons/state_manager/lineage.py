"""Which run checkpoints are of, and where it came from: what a manifest says beside its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zae.checkpoint.manifest import Manifest
from zae.loop.progress import ProgressChecker

__all__ = ["Lineage"]

MAX_RESUMES = 999  # As many as a manifest lists.


class Lineage:
    """The name of a run, the checkpoint that it started from, and those that it was resumed from.

    Parameters
    ----------
    composition : sequence of str
        The names of the add-ons.

    Attributes
    ----------
    run_id : str
        The name of the run; empty before its first checkpoint was looked for.
    parent : dict or None
        What the run started from (``start_from``): "path", "parts", and of a checkpoint "run_id", "step" and the
        "sha256" of its manifest.
    resumed_at : list of int
        The steps of the checkpoints that the run was resumed from.
    about_run : dict
        The monitor, and what the run was given (`zae.record`), as of the first save of a call of ``run``.
    """

    def __init__(self, composition: Sequence[str] = ()) -> None:
        self.composition = list(composition)
        self.run_id = ""
        self.parent: dict[str, Any] | None = None
        self.resumed_at: list[int] = []
        self.about_run: dict[str, Any] = {}

    def name_run(self, name: str) -> None:
        """Name the run unless it continues another one."""
        self.run_id = self.run_id or name

    def continue_run(self, manifest: Manifest) -> None:
        """Continue the run of a checkpoint that was loaded."""
        earlier = manifest["info"].get("resumed_at")  # It is not verified as the files are.
        steps = earlier[-MAX_RESUMES:] if isinstance(earlier, list) else []
        self.resumed_at = [*(step for step in steps if type(step) is int), manifest["step"]]
        self.run_id = manifest["run_id"]

    def describe(self, progress: ProgressChecker, world_size: int, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a manifest that are not about its files; ``info`` differs from save to save."""
        parent = {} if self.parent is None else {"parent": self.parent}
        return {
            "run_id": self.run_id or "unset",
            "step": progress.step,
            "epoch": progress.epoch,
            "composition": self.composition,
            "world_size": world_size,
            "info": {"resumed_at": list(self.resumed_at), **parent, **self.about_run, **info},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the run, and what it started from."""
        return {"run_id": self.run_id} if self.parent is None else {"run_id": self.run_id, "parent": self.parent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.run_id = state.get("run_id", "")
        self.parent = state.get("parent")
