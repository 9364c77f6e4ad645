"""ClientSink, the base class of sinks that send records to a service with its own client."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from zae.addons.loggers.base import Sink
from zae.common.redact import redact, secrets_in
from zae.errors import ConfigError, did_you_mean

__all__ = ["ClientSink"]


class ClientSink(Sink):
    """A run that the client of a service begins with the entries of ``web_logger``.

    Parameters
    ----------
    entries : mapping
        The keyword arguments of ``function``.

    Attributes
    ----------
    function : str
        The function that begins a run, as "package.name"; `load` imports it, and refuses entries that it does not take.
    accepted : tuple of str
        Entries that are accepted beside the arguments of the function.
    needed : tuple of str
        Entries of which one must be given.
    shown : tuple of str
        Entries that the service shows; `public_entries` hides secrets in them.
    requires_client : bool
        Whether a trainer is refused when the package is not installed.

    Examples
    --------
    >>> class PrinterSink(ClientSink):
    ...     name, function = "printer", "builtins.print"
    ...     def write(self, metrics, step):
    ...         print(step, metrics, **self.entries)
    >>> sink = PrinterSink({"end": "."})
    >>> sink.load()
    >>> sink.write({"train/loss": 0.5}, 10)
    10 {'train/loss': 0.5}.
    """

    function: ClassVar[str]
    accepted: ClassVar[tuple[str, ...]] = ()
    needed: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ("name", "tags")
    requires_client: ClassVar[bool] = True

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = dict(entries)

    @classmethod
    def check(cls, entries: Mapping[str, Any]) -> None:
        """Refuse entries with which no run can begin; called when a trainer is made, without importing the client."""

    def load(self) -> None:
        """Import the client, and refuse entries that its function does not take."""
        package, _, name = self.function.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(package), name)).parameters
        self.refuse_unknown(self.entries, {*parameters, *self.accepted}, self.function)

    @classmethod
    def refuse_unknown(cls, entries: Iterable[str], known: Collection[str], taker: str) -> None:
        """Raise ConfigError for the first entry that is not known to its taker."""
        for name in entries:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise ConfigError(
                    f'web_logger["{cls.name}"] has an entry {redact(name)!r} that {taker} does not take{hint}'
                )

    def public_entries(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return those entries that the service shows, without secrets."""
        shown = {key: entries[key] for key in self.shown if key in entries}
        found: dict[str, Any] = redact(shown, secrets_in(self.entries))
        return found
