"""The base class of loggers: it opens sinks, passes the records of a run to them, and closes them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from torch import Tensor

from zae import random_state
from zae.addon import AddOnBase, hook
from zae.addons.loggers.base import ClientSink, RunInfo, Sink
from zae.addons.loggers.worker import SinkGroup
from zae.arguments import Interval
from zae.description import describe
from zae.errors import AddOnRequirement, CheckpointMismatch, ConfigError, ZaeError, did_you_mean
from zae.values.redact import redact, secrets_in

__all__ = ["LoggerAddon", "WebLoggerAddon", "check_installed", "is_installed"]

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,36}")


class LoggerAddon(AddOnBase):
    """Pass every record of ``log`` to the sinks of the loggers, on the main rank only.

    A failing sink does not end the run: when it raises, or blocks for longer than ``logger_timeout``, there is one
    warning, and its records go to a local file for the lifetime of the trainer. Training is bitwise the same with and
    without loggers. A second call of ``run``, and a process that resumes, continue the same logged run. To write a
    logger, override ``sinks``.

    Parameters
    ----------
    logger_required : bool
        Raise `zae.LoggerError` when a sink fails, instead of writing its records to a local file.
    logger_fallback : str or Path
        The folder of the local files, ``<sink>-<run id>.jsonl``.
    logger_timeout : float
        Seconds that training waits for a sink: when it is opened, when a state is saved and when it is closed. A sink
        that takes longer has failed.
    hyperparameters : dict, optional
        Values of your script to show beside the options of the trainer, which every logger writes by itself.

    Raises
    ------
    ConfigError
        An option has an invalid value.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons.loggers.logger import LoggerAddon
    >>> from zae.addons.loggers.base import Sink
    >>> class ListSink(Sink):
    ...     name, rows = "list", []
    ...     def write(self, metrics, step):
    ...         self.rows.append((step, metrics["train/loss"]))
    >>> class ListLoggerAddon(LoggerAddon):
    ...     "Log to a list."
    ...     def sinks(self):
    ...         return [*super().sinks(), ListSink()]
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model.weight * batch).sum()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> trainer = Task.add_on(ListLoggerAddon)(model, "cpu", optimizer=optimizer, log_every=1)
    >>> _ = trainer.run(1, [torch.ones(1, 1)] * 3)
    >>> ListSink.rows
    [(1, 0.0), (2, -1.0), (3, -2.0)]
    """

    layer = "observe"
    traits = ("writes_records",)
    state_attributes = ("_run_id", "_records")
    process_attributes = {"_group": None}
    _failed: bool
    _failed_sinks: set[str]
    _resumed_at: int | None

    def __init__(
        self,
        *args: Any,
        logger_required: bool = False,
        logger_fallback: str | Path = "zae-offline",
        logger_timeout: Annotated[float, Interval("[0.1, inf)")] = 5.0,
        hyperparameters: Annotated[Mapping[str, Any], "a dict: {'width': 512, 'depth': 4}"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.hyperparameters = dict(hyperparameters or {})
        if not isinstance(logger_fallback, (str, os.PathLike)) or not str(logger_fallback):
            raise ConfigError(f"logger_fallback={logger_fallback!r}; give a folder, for instance 'zae-offline'")
        self.logger_required = logger_required
        self.logger_fallback = Path(os.path.expanduser(logger_fallback))
        # A lock cannot wait for arbitrarily long; eleven days are as good as forever.
        self.logger_timeout = min(logger_timeout, 1e6)
        self._group: SinkGroup | None = None  # While a run is logged.
        self._failed = False
        self._failed_sinks = set()  # Sinks that have failed: a second run does not wait for them again.
        self._run_id: str | None = None  # None until the sinks are first opened.
        self._records = 0
        self._resumed_at = None

    @hook
    def sinks(self) -> list[Sink]:
        """Return new sinks for the records of a run; a logger returns ``[*super().sinks(), MySink()]``."""
        return []

    def on_run_begin(self) -> None:
        """Open the sinks, so that an error in one is raised before the first batch."""
        super().on_run_begin()
        self._open_sinks()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass a record to every sink, with its epoch and the number of batches so far."""
        super().log(metrics, step)
        self._open_sinks()
        self._records += 1
        if self._group is not None:
            progress = self.progress_checker
            at = {"epoch": progress.epoch + bool(progress.epoch_batch), "batch": progress.batch}
            record = {**at, **{str(key): _plain(value) for key, value in metrics.items()}}
            self._group.write(record, step)

    @property
    def clients(self) -> dict[str, Any]:
        """What the libraries of the loggers have opened for this run, by the names of their sinks; on the main rank.

        ``trainer.clients["wandb"]`` is the run of wandb, ``["tensorboard"]`` the SummaryWriter, ``["neptune"]`` and
        ``["trackio"]`` their runs, ``["mlflow"]`` a pair of the MlflowClient and the id of the run. MLflow is called by
        another thread. The dict is empty before and after a run.
        """
        return {} if self._group is None else self._group.clients

    def on_exception(self, error: BaseException) -> None:
        """Note that the run has failed, for sinks that show it."""
        self._failed = True
        super().on_exception(error)

    def teardown(self) -> None:
        """Close the sinks."""
        try:
            self._close_sinks()
        finally:
            super().teardown()

    def state_dict(self) -> dict[str, Any]:
        """Wait until the sinks have written what the state counts."""
        if self._group is not None:
            self._group.flush()
        return super().state_dict()

    def adapt_state(self, entry: Any) -> Any:
        """Accept the state of a run that was not logged; refuse a name that could lead to another folder."""
        entry = {"run_id": None, "records": 0} if entry is None else entry
        run_id, records = (entry.get("run_id"), entry.get("records")) if isinstance(entry, Mapping) else (None, None)
        if isinstance(records, int) and (run_id is None or (isinstance(run_id, str) and _RUN_ID.fullmatch(run_id))):
            return entry
        raise CheckpointMismatch("the state of LoggerAddon contains no valid run_id and records")

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue the logged run of the state."""
        super().load_state_dict(state, strict)
        self._close_sinks()
        self._resumed_at = self.progress_checker.step if self._run_id is not None else None

    def _open_sinks(self) -> None:
        """Open the sinks, once for a call of ``run``."""
        if self._group is not None or not self.is_main:
            return
        sinks = self.sinks()
        continued = self._run_id is not None
        if sinks:
            self._run_id = self._run_id or secrets.token_hex(8)
        hidden = self._secrets()
        info = RunInfo(
            id=self._run_id or "",
            continued=continued,
            resumed_at=self._resumed_at,
            records=None if self._resumed_at is None else self._records,
            timeout=self.logger_timeout,
            **redact(describe(self), hidden),
        )
        self._group = SinkGroup(
            sinks,
            info,
            self.logger_fallback.absolute(),
            required=self.logger_required,
            secrets=hidden,
            failed_names=self._failed_sinks,
        )
        # A client may draw random numbers, for the name of a folder or the time until a retry.
        with random_state.isolated():
            self._group.open()
        self._resumed_at = None

    def _close_sinks(self) -> None:
        """Close every sink; raise the first error of a required one, unless the run has failed already."""
        group = self._group
        self._group = None
        run_failed = self._failed
        self._failed = False
        if group is None:
            return
        try:
            with random_state.isolated():
                group.close(run_failed)
        except ZaeError:
            if not run_failed:
                raise
        finally:
            if not self.logger_required:
                self._failed_sinks |= group.failed_names

    def _secrets(self) -> list[str]:
        """Return texts to remove from messages."""
        return []


class WebLoggerAddon(LoggerAddon):
    """The base class of the loggers that send records to a service; they share the option ``web_logger``.

    Parameters
    ----------
    web_logger : dict
        The settings of each client under the key of its logger: ``{"wandb": {"project": "my-project"}}``.

    Raises
    ------
    ConfigError
        An entry is missing, or belongs to an add-on that the class does not have.

    Examples
    --------
    >>> from zae.addons.loggers.logger import WebLoggerAddon
    >>> from zae.addons.loggers.base import ClientSink
    >>> class PaperSink(ClientSink):
    ...     name, function = "paper", "paper.begin"  # Of the package paper; the entries are its arguments.
    ...     def write(self, metrics, step):
    ...         self.client.print(step, metrics)
    >>> class PaperLoggerAddon(WebLoggerAddon):
    ...     "Send records to a printer, which web_logger={'paper': {...}} sets."
    ...     web_key, web_sink = "paper", PaperSink
    """

    web_key: ClassVar[str] = ""
    web_sink: ClassVar[type[ClientSink] | None] = None
    web_example: ClassVar[str] = '{"project": "my-project"}'

    def __init__(self, *args: Any, web_logger: Mapping[str, Mapping[str, Any]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        line = self._option_example("web_logger")
        if not isinstance(web_logger, Mapping):
            raise ConfigError(f"web_logger is a {type(web_logger).__name__}; write web_logger={line}")
        for key in web_logger:
            self._check_key(key)
        for key in self._web_keys():
            if not isinstance(web_logger.get(key), Mapping):
                fault = f"a {type(web_logger[key]).__name__} for" if key in web_logger else "no entry"
                raise ConfigError(f'web_logger has {fault} "{key}"; write web_logger={line}')
        self.web_logger = _Entries({key: _Entries(entries) for key, entries in web_logger.items()})
        for owner in self._web_loggers():
            sink = owner.web_sink
            entries = self.web_logger[owner.web_key]
            if sink is not None and (sink.requires_client or self.logger_required):
                check_installed(owner.web_key, owner)
            if sink is not None and is_installed(owner.web_key):
                sink.check(entries)
                if sink.needed and not any(entries.get(name) for name in sink.needed):
                    raise ConfigError(f'web_logger["{owner.web_key}"] has no {sink.needed[0]}; write web_logger={line}')

    def sinks(self) -> list[Sink]:
        """Add a run of each service."""
        owners = [owner for owner in self._web_loggers() if owner.web_sink is not None]
        return [*super().sinks(), *(owner.web_sink(self.web_logger[owner.web_key]) for owner in owners)]

    @classmethod
    def _web_loggers(cls) -> list[Any]:
        """Return the loggers of this class that have a key, the innermost first."""
        return [owner for owner in reversed(cls.__mro__) if owner.__dict__.get("web_key")]

    @classmethod
    def _web_keys(cls) -> dict[str, str]:
        """Map the keys that the web loggers of this class read to their owners."""
        return dict(sorted((owner.web_key, owner.__name__) for owner in cls._web_loggers()))

    @classmethod
    def _option_example(cls, name: str) -> str:
        """Return a value to write for an option that is missing."""
        entries = ", ".join(sorted(f'"{owner.web_key}": {owner.web_example}' for owner in cls._web_loggers()))
        return f"{{{entries}}}" if name == "web_logger" else "..."

    def _check_key(self, key: Any) -> None:
        """Refuse an entry that this class does not read."""
        owners = {c.web_key: c.__name__ for c in WebLoggerAddon.__subclasses__() if c.web_key}
        if key in self._web_keys():
            return
        if key in owners:
            raise ConfigError(f"web_logger has an entry {key!r} of {owners[key]}; add it: .add_on({owners[key]})")
        known = self._web_keys() or owners
        hint = did_you_mean(str(key), known) or f"; available: {', '.join(known)}"
        raise ConfigError(f"web_logger has an unknown entry {redact(key)!r}{hint}")

    def _secrets(self) -> list[str]:
        return [*super()._secrets(), *secrets_in(self.web_logger)]


class _Entries(dict[str, Any]):
    """A dict whose repr hides secrets, because ``explain`` and tracebacks print options."""

    def __repr__(self) -> str:
        return repr(redact(dict(self)))


def check_installed(package: str, owner: type) -> None:
    """Raise AddOnRequirement if a package that an add-on needs is not installed."""
    if not is_installed(package):
        requirement = f'"zae[{package}]"' if owner.__module__.startswith("zae.") else package
        raise AddOnRequirement(f"{owner.__name__} needs {package}, which is not installed: pip install {requirement}")


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it.

    Examples
    --------
    >>> is_installed("torch"), is_installed("no_such_package")
    (True, False)
    """
    try:
        return find_spec(package) is not None
    except ValueError:  # sys.modules[package] is None: the import is blocked.
        return False


def _plain(value: Any) -> Any:
    """Return a Python number, detached from graph and device, or short text for other values."""
    if isinstance(value, Tensor):
        value = value.detach()
    if isinstance(value, (bool, int, float)):
        return value
    try:
        number = value.item() if hasattr(value, "item") else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = value
    return number if isinstance(number, (bool, int, float)) else str(redact(str(value)))[:200]
