"""Log the records of a run to a file of JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zae.addons.loggers.base import JSONLSink, Sink
from zae.addons.loggers.logger import LoggerAddon
from zae.arguments.paths import check_file

__all__ = ["JSONLLoggerAddon"]


class JSONLLoggerAddon(LoggerAddon):
    """Log to a file with one JSON object in each line.

    A record reads ``{"step": 10, "epoch": 1, "batch": 10, "train/loss": 0.5, "lr": 0.1, "unix_time": 1764079800.123}``:
    the number of optimizer steps and loader batches so far, and the epoch, from 1. NaN and infinities are the strings
    "nan", "inf" and "-inf", so that every line is strict JSON. After a kill and a resume each record is there exactly
    once. Before its first record, a new run and a resumed one write a line whose key "run" describes it: options,
    composition, ``explain()`` and environment. ``python -m zae report`` makes a page of the file.

    Parameters
    ----------
    jsonl_path : str or Path
        The file; its folder is created. A second call of ``run`` and a resumed run append to it. A new run renames an
        existing file to ``name.1.jsonl``.

    Raises
    ------
    ConfigError
        At construction, when the path cannot be written.

    Examples
    --------
    >>> import json, tempfile, torch
    >>> from pathlib import Path
    >>> from zae import Trainer
    >>> from zae.addons import JSONLLoggerAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model.weight * batch).sum()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "run.jsonl")
    ...     trainer = Task.add_on(JSONLLoggerAddon)(model, "cpu", optimizer=optimizer, jsonl_path=path)
    ...     _ = trainer.run(2, [torch.ones(1, 1)] * 2)
    ...     about, *records = map(json.loads, path.read_text().splitlines())
    >>> about["run"]["config"]["composition"], [(each["step"], each["train/loss"]) for each in records]
    (['JSONLLoggerAddon'], [(2, -0.5), (4, -2.5)])
    """

    def __init__(self, *args: Any, jsonl_path: str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.jsonl_path = check_file(jsonl_path, "jsonl_path", "metrics.jsonl")

    def sinks(self) -> list[Sink]:
        """Add the file."""
        return [*super().sinks(), JSONLSink(self.jsonl_path)]
