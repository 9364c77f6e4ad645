"""Log the records of a run with the Neptune client, to a server or to its offline files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from zae.addons.loggers.base import ClientSink, RunInfo
from zae.addons.loggers.logger import WebLoggerAddon
from zae.errors import AddOnRequirement

__all__ = ["NeptuneLoggerAddon", "NeptuneSink"]

_LOCAL_MODES = ("offline", "debug")
_OFFLINE = 'web_logger={"neptune": {"mode": "offline"}}'


class NeptuneSink(ClientSink):
    """A run of the Neptune client."""

    name = "neptune"
    has_queue = True
    remedy = (
        f"note that Neptune's hosted service has ended: set NEPTUNE_API_TOKEN to one of your own server, log to files "
        f'with {_OFFLINE} (pip install "zae[neptune]"), or take TensorBoardLoggerAddon or JSONLLoggerAddon instead'
    )

    function = "neptune.init_run"
    shown = ("name", "description", "tags")
    requires_client = False
    _timeout = 5.0

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        if "api_tkn" in self.entries:
            self.entries["api_token"] = self.entries.pop("api_tkn")

    @classmethod
    def check(cls, entries: Mapping[str, Any]) -> None:
        """Refuse a run that needs a token and has none."""
        mode = entries.get("mode") or os.environ.get("NEPTUNE_MODE") or "async"
        has_token = entries.get("api_token") or entries.get("api_tkn") or os.environ.get("NEPTUNE_API_TOKEN")
        if mode not in _LOCAL_MODES and not has_token:
            raise AddOnRequirement(
                "NeptuneLoggerAddon has no API token; log in with: export NEPTUNE_API_TOKEN=... (the hosted service "
                f"has ended, so you need your own server), or log to files: {_OFFLINE}"
            )

    def open(self, info: RunInfo) -> None:
        """Start the run, or continue the one with this id."""
        import neptune
        from neptune.utils import stringify_unsupported

        entries = dict(self.entries)
        if "with_id" not in entries:
            entries.setdefault("custom_run_id", info.id)
        self._timeout = info.timeout
        self.client = neptune.init_run(**{**entries, **self.public_entries(entries)})
        self.client["config"] = stringify_unsupported(dict(info.config))

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append to each series; values that are not finite, which Neptune would skip, go to a series of texts."""
        for key, value in metrics.items():
            if isinstance(value, str) or not math.isfinite(value):
                self.client[f"texts/{key}"].append(str(value), step=step)
            else:
                self.client[key].append(value, step=step)

    def flush(self) -> None:
        """Wait until the client has written its calls to the disk, from where it sends them."""
        if self.client is not None:
            self.client.wait(disk_only=True)

    def close(self, failed: bool) -> None:
        """Stop the run."""
        if self.client is not None:
            if failed:
                self.client["sys/failed"] = True
            self.client.stop(seconds=self._timeout * 0.9)
        self.client = None


class NeptuneLoggerAddon(WebLoggerAddon):
    """Log with the Neptune client.

    Its hosted service ended on 2026-03-05, and its data are deleted: this is for a server of one's own, and for code
    that was written for it. Where the package is absent or no server answers, there is one warning and the records go
    to a local file. For a new project, use TensorBoardLoggerAddon or JSONLLoggerAddon.

    ``web_logger["neptune"]`` goes to ``neptune.init_run``: project, api_token (or api_tkn), mode and so on.

    Parameters
    ----------
    web_logger : dict
        Declared by `WebLoggerAddon`, and shared by all web loggers.

    Raises
    ------
    AddOnRequirement
        At construction, when there is no API token and the mode needs one; and when neptune is not installed, if
        ``logger_required=True``.

    Examples
    --------
    >>> import logging, neptune, torch
    >>> from zae.addons import NeptuneLoggerAddon
    >>> from zae.testing import PlainTask
    >>> logging.getLogger("neptune").setLevel("WARNING")  # Else the client logs its own steps.
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> debug = {"mode": "debug", "capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False}
    >>> trainer = PlainTask.add_on(NeptuneLoggerAddon)(
    ...     model, "cpu", optimizer=torch.optim.SGD, web_logger={"neptune": debug}
    ... )
    >>> trainer.run(2, batches)["epoch"]
    2
    """

    web_key = "neptune"
    web_sink = NeptuneSink
