"""What the batches of a loader follow from: random streams, and the states and values of its parts.

All of it has two states, of the epoch's begin and of the present: an order is drawn again from the first, and goes on
from the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from zae import random_state
from zae.data.loader_parts import LoaderParts
from zae.data.loader_state import capture_parts, is_exhausted, restore_parts
from zae.data.loader_values import LoaderValues

__all__ = ["LoaderStreams", "State"]

State: TypeAlias = "Mapping[str, Any]"
"""What `LoaderStreams.capture` returns."""


class LoaderStreams:
    """What the batches of a loader follow from.

    Attributes
    ----------
    loader : iterable or None
        The loader of the epoch; None before the first one.
    values : LoaderValues
        What training has changed in its parts.
    begin : dict or None
        What was captured as the epoch began; None between two epochs.
    """

    def __init__(self, loader: Any, values: LoaderValues) -> None:
        self.loader = loader
        self.values = values
        self.begin: State | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return both states, and the facts of the loader."""
        parts = LoaderParts(self.loader)
        return {
            "begin": self.values.without_unchanged(self.begin),
            "present": self.values.without_unchanged(self._capture(parts)),
            "facts": {} if self.loader is None else parts.facts(),
        }

    def mark_begin(self) -> None:
        """Note that an epoch begins here."""
        self.begin = self.capture()

    def capture(self) -> dict[str, Any]:
        """Return the present state, to come back to it in this process, with values that only what follows changes."""
        return self._capture(LoaderParts(self.loader), with_unchanged=True)

    def _capture(self, parts: LoaderParts, with_unchanged: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = {"random": random_state.capture(), "generators": None, "parts": {}, "values": {}}
        if self.loader is not None:
            state["generators"] = [generator.get_state() for generator in parts.generators]
            state["parts"] = capture_parts(parts)
            state["values"] = {"values": self.values.capture(parts, with_unchanged)}
        return state

    def restore(self, state: State, only_streams: bool = False, with_values: bool = True) -> bool:
        """Restore a captured state, and return whether a part has loaded a state of its own."""
        random_state.restore(state["random"])
        if state["generators"] is not None:
            random_state.restore_generators(self.loader, state["generators"])
        parts = LoaderParts(self.loader)
        if not with_values or not state.get("values"):
            return restore_parts(parts, state["parts"], only_streams)
        marks = self.values.marks(parts)
        has_loaded = restore_parts(parts, state["parts"], only_streams)
        self.values.put_back(self.loader, state, marks)
        return has_loaded

    def rewind(self, state: State, with_values: bool = True) -> None:
        """Restore the beginning of an epoch, also where a sampler loads a state of the end of the previous one."""
        if self.restore(state, with_values=with_values):
            at_end = is_exhausted(LoaderParts(self.loader))
            if at_end is not None:
                self.restore(state, only_streams=at_end, with_values=with_values and not at_end)
