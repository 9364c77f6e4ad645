"""Recognise a batch by a digest: the one that was used last, and those that epochs begin with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zae.torch_private import version_of
from zae.values.plain_values import content_digest, plain_value
from zae.values.walk import leaves_of

__all__ = ["FirstBatches", "LastBatch", "is_comparable"]

_log = logging.getLogger("zae")
_FORM = "2:"
"""What a digest begins with; those of older versions looked at the beginning of a batch, and are not compared."""


def is_comparable(digest: str | None) -> bool:
    """Return whether a digest that was saved is of the present form."""
    return digest is not None and digest.startswith(_FORM)


class LastBatch:
    """The batch that was used last, of a loader whose first batches a resumed run reads again and drops.

    Its digest is in the state, and the batch at its place is compared with it: a stream that draws from an unseeded
    generator, or that counts how often it was read, yields others.
    """

    def __init__(self, batch: Any) -> None:
        # Its leaves: a step may change a dict, an object, or a tensor in place, which is then not compared.
        self._leaves = [(leaf, _versions_in(leaf)) for _, leaf in leaves_of(batch)]

    def digest(self) -> str | None:
        """Return a digest of all that it holds; None where a step has changed it."""
        if any(_versions_in(leaf) != versions for leaf, versions in self._leaves):
            return None
        values = [content_digest(leaf) if isinstance(leaf, Tensor) else plain_value(leaf) for leaf, _ in self._leaves]
        return _FORM + content_digest(values)


def _versions_in(leaf: Any) -> Any:
    """Return what changes where a step changes a tensor, or an attribute of an object."""
    if isinstance(leaf, Tensor):
        return version_of(leaf)
    attributes = getattr(leaf, "__dict__", {})
    return [
        (name, id(attribute), version_of(attribute) if isinstance(attribute, Tensor) else 0)
        for name, attribute in attributes.items()
    ]


class FirstBatches:
    """The batches that epochs begin with: a loader that began again is seen by them.

    Its epoch begins as the first one did, after a resume, and no other epoch does.
    """

    def __init__(self) -> None:
        self._digest: str | None = None  # Of the first epoch.
        self._has_others = False  # Whether an epoch began with another batch,
        self._has_same = False  # and whether one began with the same batch.
        self._is_resumed = False
        self._is_suspect = False  # Whether the only one that began with the same batch came after the resume.

    def note(self, batch: Any, name: str) -> None:
        """Look at the batch that an epoch begins with."""
        digest = LastBatch(batch).digest()
        if self._digest is None:
            self._digest = digest
        elif digest == self._digest:
            self._is_suspect = self._is_resumed and not self._has_same
            self._has_same = True
        else:
            self._has_others = True
        self._is_resumed = False
        if self._is_suspect and self._has_others:
            self._is_suspect = False
            _log.warning(
                "the %s began again with this resume: an epoch after it began with the batch that the first epoch "
                "began with, and no epoch before it did, so that samples come in another order than without a resume. "
                "What it keeps over its epochs is in no checkpoint: give it state_dict and load_state_dict",
                name,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return an entry for a state, once an epoch has begun."""
        noted = [self._digest, self._has_others, self._has_same]
        return {} if self._digest is None else {"first_batch": noted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the entry of a state; a process that has seen no epoch of this loader resumes."""
        self._is_resumed = self._digest is None
        if "first_batch" in state:
            self._digest, self._has_others, self._has_same = state["first_batch"]
