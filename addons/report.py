"""Write a page with the curves of a run, and all else that is known of it, when the run ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zae.addon import AddOnBase
from zae.common.argument_checks import check_file
from zae.common.redact import redact, secrets_in
from zae.description import describe
from zae.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from zae.report.records import Run

__all__ = ["ReportAddon"]

_log = logging.getLogger("zae")


class ReportAddon(AddOnBase):
    """Write a report when a run ends, also after an error or an interruption: one HTML file, for any browser.

    It shows what was logged as curves, metrics, options, composition, environment and checkpoints, and requests nothing
    from anywhere. ``python -m zae report`` writes the same page of a run that was logged to a file, compares several
    runs, and verifies the checkpoints. Only the main rank writes. Where the page cannot be written, there is a warning.
    The times of records from before a resume are not known.

    Parameters
    ----------
    report_path : str or Path
        The file, for instance ``"run/report.html"``; its folder is created. The next run replaces it.

    Raises
    ------
    ConfigError
        At construction, when the path cannot be written or does not end with ``.html``.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from zae import Trainer
    >>> from zae.addons import ReportAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model.weight * batch).sum()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "report.html")
    ...     trainer = Task.add_on(ReportAddon)(model, "cpu", optimizer=optimizer, report_path=path)
    ...     _ = trainer.run(2, [torch.ones(1, 1)] * 2)
    ...     print(path.read_text()[:15])
    <!DOCTYPE html>
    """

    layer = "observe"
    process_attributes = {"_report_times": [], "_report_began": None, "_report_status": None}

    def __init__(self, *args: Any, report_path: str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report_path = check_file(report_path, "report_path", "report.html")
        if self.report_path.suffix not in (".html", ".htm"):
            raise ConfigError(f"report_path={str(report_path)!r} would not be opened as a page; end it with .html")
        self._report_times: list[tuple[float, int]] = []  # Of the last records, and their epochs.
        self._report_began: tuple[float, int] | None = None  # When this process began to log, and after which step.
        self._report_status: str | None = None  # None outside of a run.

    def on_run_begin(self) -> None:
        """Begin to note times."""
        super().on_run_begin()
        self._note_report_begin()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Note when a record was logged."""
        super().log(metrics, step)
        self._note_report_begin()
        progress = self.progress_checker
        self._report_times.append((time.time(), progress.epoch + bool(progress.epoch_batch)))

    def on_exception(self, error: BaseException) -> None:
        """Note how the run ended."""
        self._report_status = f"ended by {type(error).__name__}"
        super().on_exception(error)

    def teardown(self) -> None:
        """Write the page, after the last checkpoint."""
        status = self._report_status
        self._report_status = None
        try:
            super().teardown()
        finally:
            if status is not None and self.is_main:
                self._write_report(status or self.progress_checker.stop_reason or "")

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Forget the times of other records than those of the state."""
        super().load_state_dict(state, strict)
        self._report_times = []
        self._report_began = None

    def _note_report_begin(self) -> None:
        self._report_status = self._report_status or ""
        self._report_began = self._report_began or (time.time(), self.progress_checker.step)

    def _write_report(self, status: str) -> None:
        """Write the page, or warn; an error of the run is not to be hidden."""
        from zae.report.page import write

        try:
            write(self.report_path, [self._described_run(status)])
        except CheckpointError as error:
            _log.warning("the report is missing: %s", redact(str(error)))
        except Exception as error:
            said = redact(str(error))
            _log.warning("the report %s is missing: %s: %s", self.report_path, type(error).__name__, said)

    def _described_run(self, status: str) -> Run:
        """Return the run as the page shows it; records of before a resume have no times."""
        from zae.doctor.checkpoints import examine
        from zae.report.records import Records, Run

        rows = self.log_history
        began = self._report_began or (time.time(), self.progress_checker.step)
        known = max(0, len(rows) - len(self._report_times))
        times = [{"unix_time": at, "epoch": epoch} for at, epoch in self._report_times]
        about = redact(describe(self), secrets_in(vars(self).get("web_logger")))
        header = {"step": began[1], "unix_time": began[0], "run": about}
        records = Records.of(
            [*rows[:known], header, *({**row, **at} for row, at in zip(rows[known:], times, strict=False))]
        )
        saved = about["config"].get("save_path")
        reports = [examine(saved, reads_all=False)] if isinstance(saved, str) and os.path.isdir(saved) else []
        name = self.report_path.parent.name
        return Run(redact(name), records, redact(reports), status=redact(status))
