"""What the batches of a loader follow from: the random streams, and what its parts hold, captured and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from zae import random_state
from zae.data.loader_state import capture_parts, is_exhausted, restore_parts
from zae.data.part_values import PartValues

__all__ = ["LoaderStreams", "State"]

State: TypeAlias = "Mapping[str, Any]"
"""What `LoaderStreams.capture` returns."""


class LoaderStreams:
    """The random streams of the process, and the states and values of a loader's parts.

    Attributes
    ----------
    loader : iterable or None
        The loader of the epoch; None before the first one.
    begin : dict or None
        What was captured as the epoch began; None between two epochs.
    """

    def __init__(self, loader: Any, values: PartValues) -> None:
        self.loader = loader
        self.begin: State | None = None
        self._values = values

    def mark_begin(self) -> None:
        """Note that an epoch begins here."""
        self.begin = self.capture(with_unchanged=True)

    def capture(self, with_unchanged: bool = False) -> dict[str, Any]:
        """Return the present state; to come back to it in this process, with values that only what follows changes."""
        state: dict[str, Any] = {"random": random_state.capture(), "generators": None, "parts": {}, "values": {}}
        if self.loader is not None:
            state["generators"] = random_state.capture_generators(self.loader)
            state["parts"] = capture_parts(self.loader)
            state["values"] = self._values.capture(self.loader, with_unchanged)
        return state

    def with_changed(self, state: State | None) -> dict[str, Any] | None:
        """Return a captured state with those values alone that training has changed."""
        if state is None:
            return None
        other_entries = {key: entry for key, entry in state.items() if key != "values"}
        changed = self._values.changed_in(state.get("values", {}))
        return {**other_entries, "values": changed} if changed["values"] else other_entries

    def restore(self, state: State, only_streams: bool = False, with_values: bool = True) -> bool:
        """Restore a captured state, and return whether a part has loaded a state of its own."""
        random_state.restore(state["random"])
        if state["generators"] is not None:
            random_state.restore_generators(self.loader, state["generators"])
        values = state.get("values", {}) if with_values else {}
        marks = self._values.marks(self.loader) if values else {}
        has_loaded = restore_parts(self.loader, state["parts"], only_streams)
        if values:
            self._values.restore(self.loader, values, marks)
        return has_loaded

    def rewind(self, state: State, with_values: bool = True) -> None:
        """Restore the beginning of an epoch, also where a sampler loads a state of the end of the previous one."""
        if self.restore(state, with_values=with_values):
            at_end = is_exhausted(self.loader)
            if at_end is not None:
                self.restore(state, only_streams=at_end, with_values=with_values and not at_end)
