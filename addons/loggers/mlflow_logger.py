"""Log the records of a run with the MLflow client, to a server or to a database."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from zae.addons.loggers.base import ClientSink, RunInfo
from zae.addons.loggers.logger import WebLoggerAddon

__all__ = ["MLflowLoggerAddon", "MLflowSink"]

_KNOWN_ENTRIES = ("experiment_name", "tracking_uri", "run_id", "run_name", "tags")
_INVALID_CHARACTERS = re.compile(r"[^\w\-. /]")  # What MLflow does not take in the name of a metric or a parameter.
_MAX_NAME_LENGTH = 250
_MAX_VALUE_LENGTH = 500
_TAG = "zae.run_id"


def _name_for(key: str) -> str:
    """Return a name that MLflow takes: it may be a path, and must then be the only name of that path."""
    parts = _INVALID_CHARACTERS.sub("_", key).split("/")
    name = "/".join("_" * max(1, len(part)) if part in ("", ".", "..") else part for part in parts)
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]  # Two long names may begin alike.
    return f"{name[: _MAX_NAME_LENGTH - len(digest) - 1]}-{digest}"


class MLflowSink(ClientSink):
    """A run of MLflow; its ``client`` is a pair of the MlflowClient and the id of the run."""

    name = "mlflow"
    remedy: ClassVar[str] = (
        "mend what this says; if it says that no answer came, "
        "check the network and MLFLOW_TRACKING_URI, raise logger_timeout, or log to a database: "
        'web_logger={"mlflow": {"tracking_uri": "sqlite:///mlflow.db", ...}}'
    )
    needed = ("experiment_name", "run_id")
    shown = ("run_name", "tags")
    _mlflow: Any = None

    @classmethod
    def check(cls, entries: Mapping[str, Any]) -> None:
        """Refuse entries that are not known."""
        cls.refuse_unknown(entries, _KNOWN_ENTRIES, "MLflowLoggerAddon")

    def load(self) -> None:
        """Import mlflow and make its client, which may first create the tables of a database."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # Read as it is imported.
        # The time until a retry would be drawn from Python's random stream, which is that of training.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
        import mlflow

        self._mlflow = mlflow.MlflowClient(tracking_uri=self.entries.get("tracking_uri"))

    def open(self, info: RunInfo) -> None:
        """Create a run, or continue the one with this id."""
        client = self._mlflow
        entries = self.entries
        run_id = entries.get("run_id") or self._find(info)
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            self.client = (client, run_id)
            return
        versions = {f"zae.{name}": str(value) for name, value in info.environment.items()}
        shown = self.public_entries(entries)
        tags = {**versions, _TAG: info.id, **(shown.get("tags") or {})}
        name = shown.get("run_name") or info.id
        run_id = client.create_run(self._experiment(), tags=tags, run_name=name).info.run_id
        self.client = (client, run_id)
        from mlflow.entities import Param

        options = [Param(_name_for(key), str(value)[:_MAX_VALUE_LENGTH]) for key, value in info.flat_config.items()]
        for start in range(0, len(options), 100):  # The most that a server takes at once.
            client.log_batch(run_id, params=options[start : start + 100])

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if it is not there."""
        name = self.entries["experiment_name"]
        experiment = self._mlflow.get_experiment_by_name(name)
        experiment_id: str = self._mlflow.create_experiment(name) if experiment is None else experiment.experiment_id
        return experiment_id

    def _find(self, info: RunInfo) -> str | None:
        """Return the id of the run that is continued; None where it is a new one."""
        if not info.continued:
            return None
        runs = self._mlflow.search_runs([self._experiment()], f"tags.`{_TAG}` = '{info.id}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log a metric for each number, and a tag for anything else."""
        from mlflow.entities import Metric, RunTag

        client, run_id = self.client
        at = round((self.logged_at or time.time()) * 1000)
        names = {key: _name_for(key) for key in metrics}
        texts = [RunTag(names[key], value) for key, value in metrics.items() if isinstance(value, str)]
        numbers = [
            Metric(names[key], float(value), at, step) for key, value in metrics.items() if not isinstance(value, str)
        ]
        client.log_batch(run_id, metrics=numbers, tags=texts)

    def close(self, failed: bool) -> None:
        """End the run, which may be continued later."""
        if self.client is not None:
            client, run_id = self.client
            client.set_terminated(run_id, "FAILED" if failed else "FINISHED")
        self.client = None


class MLflowLoggerAddon(WebLoggerAddon):
    """Log with the MLflow client.

    ``web_logger["mlflow"]`` has the experiment_name, and optionally tracking_uri, run_name, run_id and tags. Without a
    tracking_uri it is that of MLflow: MLFLOW_TRACKING_URI, or a database in the present folder. Options are parameters
    of the run, versions are tags, records are metrics over optimizer steps. A resumed run continues the run of MLflow
    with its tag ``zae.run_id``; steps after the loaded state are there twice then.

    Parameters
    ----------
    web_logger : dict
        Declared by `WebLoggerAddon`, and shared by all web loggers.

    Raises
    ------
    AddOnRequirement
        At construction, when mlflow is not installed.
    ConfigError
        At construction, when there is no experiment_name.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from zae.addons import MLflowLoggerAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # A server or a database does without.
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logs = {"mlflow": {"experiment_name": "demo", "tracking_uri": f"file:{folder}"}}
    ...     trainer = PlainTask.add_on(MLflowLoggerAddon)(model, "cpu", optimizer=torch.optim.SGD, web_logger=logs)
    ...     print(trainer.run(2, batches)["epoch"])
    2
    """

    web_key = "mlflow"
    web_example = '{"experiment_name": "my-project"}'
    web_sink = MLflowSink
