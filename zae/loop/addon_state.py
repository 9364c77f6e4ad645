"""The state of add-ons in a checkpoint: declared attributes, and random generators."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.tensor_bytes import byte_view, dense
from zae.compose.first_call import watching_first_calls
from zae.compose.introspect import is_add_on
from zae.errors import AddOnError, CheckpointError, CheckpointMismatch
from zae.values.walk import copy_of, tensors_in

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = [
    "ENTRIES",
    "FROM_FILE",
    "GENERATORS",
    "PARTS",
    "PARTS_WITHOUT_ROWS",
    "USER_STATE",
    "Generators",
    "as_saved",
    "attributes_by_owner",
    "check_attributes",
    "digest",
    "gather_tensors",
    "is_in_mode",
    "key_of",
    "read_attributes",
    "state_mode",
]

_log = logging.getLogger("zae")
GENERATORS = "generators"
"""The key of `Generators` in a state; it is there once an add-on has drawn from one."""
USER_STATE = "user_state"
"""The key of what training has changed in the user's objects, `zae.loop.user_state`."""
_ON_HOST = "on host"  # Not a name in Python: it stands beside the attributes in an entry.

FROM_FILE = "from a file"
"""A state is loaded whose tensors nobody else holds: they need not be copied."""
ENTRIES = "entries alone"
"""One rank alone reads or loads only the entries of add-ons."""
PARTS = "in parts"
"""A state is read with the parts of the tensors that each rank holds."""
PARTS_WITHOUT_ROWS = "in parts, without the rows of the history"
"""The same without the rows, which a save has in files of their own."""
_mode: ContextVar[tuple[Any, str]] = ContextVar("_mode", default=(None, ""))


def is_in_mode(trainer: Trainer, *modes: str) -> bool:
    """Return whether the state of a trainer is being read or loaded in one of these modes."""
    return _mode.get()[0] is trainer and _mode.get()[1] in modes


@contextmanager
def state_mode(trainer: Trainer, mode: str) -> Iterator[None]:
    """Read or load the state of a trainer in a mode, within the block."""
    token = _mode.set((trainer, mode))
    try:
        with watching_first_calls(trainer):
            yield
    finally:
        _mode.reset(token)


def gather_tensors(trainer: Trainer, value: Any) -> Any:
    """Return a value with whole tensors on every rank, unless each rank reads its parts."""
    return value if is_in_mode(trainer, PARTS, PARTS_WITHOUT_ROWS) else trainer.engine.full_tensors(value)


# -------------------------------------------------------------------------------------------- declared attributes


def as_saved(value: Any) -> Any:
    """Return a value as it is after a save and a load; raise CheckpointError where none can contain it."""
    return decode(*encode(value))


def attributes_by_owner(cls: type) -> dict[Any, dict[str, str]]:
    """Map each add-on that declares attributes to these, by their keys in its entry, outermost add-on first."""
    declared = {}
    for base in cls.__mro__:
        names = (*base.__dict__.get("state_attributes", ()), *base.__dict__.get("rank_state_attributes", ()))
        if names and is_add_on(base):
            declared[base] = {key_of(name): name for name in names}
    return declared


def key_of(name: str) -> str:
    """Return the key of an attribute in an entry: its name without leading underscores."""
    return name.lstrip("_")


def read_attributes(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the entries of the add-ons that declare attributes."""
    entries = {}
    for owner, names in attributes_by_owner(type(trainer)).items():
        missing = [name for name in names.values() if not hasattr(trainer, name)]
        if missing:
            raise AddOnError(
                f"{owner.__name__} declares the state attribute {missing[0]!r}, which it has not set; set "
                f"self.{missing[0]} in __init__"
            )
        entry = {key: gather_tensors(trainer, getattr(trainer, name)) for key, name in names.items()}
        if trainer.device.type != "cpu":
            on_host = [key for key, value in entry.items() if any(tensor.is_cpu for tensor in tensors_in(value))]
            entry |= {_ON_HOST: on_host} if on_host else {}
        entries[owner.__name__] = entry
    return entries


def check_attributes(trainer: Trainer, owner: Any, entry: Any) -> dict[str, Any]:
    """Return the values of a saved entry by attribute, on this device; refuse one that does not fit."""
    names = attributes_by_owner(type(trainer))[owner]
    keys = {key for key in entry if key != _ON_HOST} if isinstance(entry, Mapping) else set()
    if not isinstance(entry, Mapping) or keys != set(names):
        kind = "nothing" if isinstance(entry, Mapping) else f"a {type(entry).__name__}"
        contains = ", ".join(sorted(map(str, keys))) or kind
        raise CheckpointMismatch(
            f"the state of {owner.__name__} contains {contains}; expected {', '.join(sorted(names))}. Load it with the "
            "version of the add-on that saved it"
        )
    for key, name in names.items():
        if misfit := _misfit(getattr(trainer, name, None), entry[key]):
            raise CheckpointMismatch(
                f"the state of {owner.__name__} does not fit: {key} {misfit}; build the trainer as it was saved"
            )
    on_host = entry.get(_ON_HOST, ())
    if is_in_mode(trainer, FROM_FILE) and trainer.device.type == "cpu":
        return {name: entry[key] for key, name in names.items()}
    return {name: copy_of(entry[key], None if key in on_host else trainer.device) for key, name in names.items()}


def _misfit(present: Any, saved: Any) -> str:
    """Describe how a saved value differs in kind from the present one; an empty tensor may become any other."""
    if present is None or saved is None:
        return ""
    if isinstance(present, Tensor) and isinstance(saved, Tensor):
        if present.numel() and (present.shape, present.dtype) != (saved.shape, saved.dtype):
            return f"was {tuple(saved.shape)} {saved.dtype} and is {tuple(present.shape)} {present.dtype} here"
        return ""
    kinds = (Tensor, Mapping, (list, tuple), str, (bool, int, float, complex, np.number))
    if any(isinstance(present, kind) != isinstance(saved, kind) for kind in kinds):
        return f"was a {type(saved).__name__} and is a {type(present).__name__} here"
    return ""


# ---------------------------------------------------------------------------------------------------- generators


class Generators:
    """The generators of a trainer's add-ons, by name, and the saved states of those not asked for yet.

    Each state notes the rank it belongs to, None for all: a rank that gets the state of another one derives its own
    seed from it.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._block_seed: int | None = None  # Within `isolated`.
        self._open: dict[str, torch.Generator] = {}
        self._ranks: dict[str, int | None] = {}
        self._saved: dict[str, Mapping[str, Any]] = {}

    def get(self, name: str, per_rank: bool, trainer: Trainer) -> torch.Generator:
        """Return the generator of this name, on the device of the trainer."""
        if name not in self._open:
            if self._seed is None:
                # Without seed=, the one of torch.manual_seed; where nobody has called it, torch has drawn one.
                self._seed = torch.initial_seed() if trainer.seed is None else trainer.seed
            if not per_rank and trainer.seed is None:
                self._seed = trainer.gather(self._seed)[0]
            self._open[name] = torch.Generator(trainer.device)
            self._ranks[name] = trainer.engine.dp_rank if per_rank else None
            self._place(name, self._saved.pop(name, None))
        return self._open[name]

    def _place(self, name: str, saved: Mapping[str, Any] | None) -> None:
        """Set a generator to a saved state, or seed it."""
        generator = self._open[name]
        rank = self._ranks[name]
        if self._block_seed is not None:
            generator.manual_seed(_seed_of(self._block_seed, rank, name))
        elif saved is None:
            generator.manual_seed(_seed_of(self._seed, rank, name))
        elif saved["rank"] == rank and saved["state"].numel() == generator.get_state().numel():
            generator.set_state(saved["state"].cpu())
        else:  # Of another rank, or of another kind of device.
            generator.manual_seed(_seed_of(digest(saved["state"]), rank, name))

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, and the state of each generator with its rank; empty where there are none."""
        present = {name: {"rank": self._ranks[name], "state": g.get_state()} for name, g in self._open.items()}
        states = {**self._saved, **present}
        return {"seed": self._seed, "states": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; the generators in use stay the same objects."""
        self._saved = dict(state.get("states", {}))
        self._seed = state.get("seed", self._seed)
        for name in self._open:
            self._place(name, self._saved.pop(name, None))

    @contextmanager
    def isolated(self, seed: int | None = None) -> Iterator[None]:
        """Restore the states when the block ends; with a seed, all begin at it, also those that are made in the block.

        A generator that is made in the block begins anew after it.
        """
        before = self.state_dict()
        self._block_seed = seed
        try:
            if seed is not None:
                for name in self._open:
                    self._place(name, None)
            yield
        finally:
            self._block_seed = None
            self.load_state_dict(before)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which makes its own generators and continues where these are."""
        return {**vars(self), "_open": {}, "_ranks": {}, "_saved": self.state_dict().get("states", {})}


def _seed_of(*parts: Any) -> int:
    """Hash the parts to a seed."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def digest(value: Any) -> str:
    """Return a SHA-256 of a value with all that is in it: equal on two ranks where the value is."""
    try:
        structure, tensors = encode(value)
    except CheckpointError:  # Cannot be saved, and so not compared: it counts as another value on each rank.
        return secrets.token_hex()
    sha = hashlib.sha256(json.dumps(structure).encode())
    for name, tensor in tensors.items():
        sha.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(byte_view(dense(tensor, name)))
    return sha.hexdigest()
