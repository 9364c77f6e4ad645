"""Log the records of a run to Trackio: a database on this machine, or a Space of the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from zae.addons.loggers.base import ClientSink, RunInfo
from zae.addons.loggers.logger import WebLoggerAddon

__all__ = ["TrackioLoggerAddon", "TrackioSink"]


class TrackioSink(ClientSink):
    """A run of Trackio."""

    name = "trackio"
    has_queue = True
    remedy = (
        "mend what this says; if it says that no answer came, "
        "check the network and space_id, raise logger_timeout, or leave space_id out, which logs to this machine"
    )
    function = "trackio.init"
    needed = ("project",)
    shown = ("config", "name")
    _is_new = False  # Whether something was written since the last flush.

    def open(self, info: RunInfo) -> None:
        """Start the run, or continue the one with this name."""
        config = {**info.config, **(self.entries.get("config") or {}), "zae.environment": dict(info.environment)}
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False, "resume": "allow"}
        entries = {**quiet, **self.entries, "config": config, "name": self.entries.get("name") or info.id}
        self.entries = {**entries, **self.public_entries(entries)}
        self._begin()

    def _begin(self) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # It prints how to show the dashboard.
            self.client = trackio.init(**self.entries)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log one row."""
        self.client.log(dict(metrics), step=step)
        self._is_new = True

    def flush(self) -> None:
        """Finish the run and continue it: there is no other call that waits until the rows are written."""
        if self._is_new:
            self.close(False)
            self._begin()

    def close(self, failed: bool) -> None:
        """Finish the run, which may be continued later."""
        if self.client is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                self.client.finish()
        self.client = None
        self._is_new = False


class TrackioLoggerAddon(WebLoggerAddon):
    """Log to Trackio; show the project with ``trackio show --project NAME``.

    ``web_logger["trackio"]`` goes to ``trackio.init``: project, name, group, space_id and so on. Without a space_id
    or a server_url nothing is sent: the records are in a database in TRACKIO_DIR. A resumed run continues the run of
    Trackio with its name; steps after the loaded state are there twice then.

    Parameters
    ----------
    web_logger : dict
        Declared by `WebLoggerAddon`, and shared by all web loggers.

    Raises
    ------
    AddOnRequirement
        At construction, when trackio is not installed.
    ConfigError
        At construction, when there is no project.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import TrackioLoggerAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> logs = {"trackio": {"project": "demo"}}
    >>> trainer = PlainTask.add_on(TrackioLoggerAddon)(model, "cpu", optimizer=torch.optim.SGD, web_logger=logs)
    >>> trainer.run(2, batches)["epoch"]
    2
    """

    web_key = "trackio"
    web_sink = TrackioSink
