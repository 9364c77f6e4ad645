"""Log the records of a run to TensorBoard event files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

from zae.addons.loggers.base import RunInfo, Sink
from zae.addons.loggers.logger import LoggerAddon, check_installed
from zae.arguments.paths import check_folder
from zae.compose.options import options_of

__all__ = ["TensorBoardLoggerAddon", "TensorBoardSink"]


class TensorBoardLoggerAddon(LoggerAddon):
    """Log to TensorBoard event files.

    Each metric is a scalar over optimizer steps. After a resume, TensorBoard hides records of steps after the loaded
    state; event files are flushed whenever a state is saved. Show them with ``tensorboard --logdir <log_dir>``.

    Parameters
    ----------
    log_dir : str or Path
        The folder of the event files; it is created. Use one for each run: TensorBoard shows a folder as one run. With
        StateManagerAddon it may be left out, and is ``runs`` in ``save_path``.

    Raises
    ------
    AddOnRequirement
        At construction, when tensorboard is not installed.
    ConfigError
        At construction, when ``log_dir`` is a file or cannot be written.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from zae.addons import TensorBoardLoggerAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = PlainTask.add_on(TensorBoardLoggerAddon)(model, "cpu", optimizer=torch.optim.SGD, log_dir=folder)
    ...     _ = trainer.run(2, batches)
    ...     print(len(list(Path(folder).glob("events.out.tfevents.*"))))
    1
    """

    def __init__(self, *args: Any, log_dir: str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_installed("tensorboard", TensorBoardLoggerAddon)
        self.log_dir = check_folder(log_dir, "log_dir").absolute()

    @classmethod
    def expand_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Write the event files beside the checkpoints where no folder is given."""
        expanded = super().expand_options(options)
        is_required = (
            "log_dir" in (known_options := options_of(cls)) and known_options["log_dir"][0].default is Parameter.empty
        )
        if is_required and "log_dir" not in expanded and isinstance(expanded.get("save_path"), (str, Path)):
            expanded["log_dir"] = Path(expanded["save_path"]) / "runs"
        return expanded

    def sinks(self) -> list[Sink]:
        """Add the event files."""
        return [*super().sinks(), TensorBoardSink(self.log_dir)]


class TensorBoardSink(Sink):
    """Event files in one folder, which is created."""

    name = "tensorboard"
    has_queue = True
    remedy = "free some space, or give another log_dir"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> None:
        """Import tensorboard."""
        import torch.utils.tensorboard  # noqa: F401

    def open(self, info: RunInfo) -> None:
        """Begin an event file; in older files, mark steps after the loaded one as deleted."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        if info.continued:
            _wait_for_a_later_second(self._folder)
        purge_step = None if info.resumed_at is None else info.resumed_at + 1
        self.client = SummaryWriter(str(self._folder), purge_step=purge_step)
        if not info.continued:
            self.client.add_text("config", f"```json\n{json.dumps(info.config, indent=2, default=str)}\n```")
            for summary in hparams(info.flat_config, {}):  # The method of the writer for it would begin a second file.
                self.client.file_writer.add_summary(summary)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add a scalar for each number, and text for anything else."""
        for key, value in metrics.items():
            if isinstance(value, str):
                self.client.add_text(key, value, step)
            else:
                self.client.add_scalar(key, value, step)

    def flush(self) -> None:
        """Flush the writer."""
        self.client.flush()

    def close(self, failed: bool) -> None:
        """Close the event file."""
        if self.client is not None:
            self.client.close()
        self.client = None


def _wait_for_a_later_second(folder: Path) -> None:
    """Wait for the next second: event files are read in order of their names, which begin with the second."""
    seconds = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*.*"))
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))
