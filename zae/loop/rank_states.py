"""What differs between the ranks in a state: the position in the data, the log of the epoch, and entries of add-ons.

A state has the values of one rank at their usual places. That of several ranks has besides, in the entry of the add-on
in the slot ``parallel``, a list with those of each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zae import random_state
from zae.compose.introspect import is_add_on, slots_of
from zae.errors import CheckpointMismatch
from zae.loop.addon_state import (
    ENTRIES,
    FROM_FILE,
    GENERATORS,
    PARTS,
    PARTS_WITHOUT_ROWS,
    USER_STATE,
    attributes_by_owner,
    digest,
    key_of,
    state_mode,
)
from zae.loop.epoch_log import EpochLog, merge_logs
from zae.parts import gather_dp
from zae.values.host import to_host
from zae.values.walk import is_of_zae

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["RankStates", "between_epochs", "derive_streams", "engine_of", "load_entries", "load_from_file"]

_log = logging.getLogger("zae")


class RankStates:
    """The entry of the parallel add-on in a state.

    Parameters
    ----------
    world_size : int
        The number of shares of the data in the run that saved it: of its ranks, without tensor parallelism.
    ranks : sequence of mapping
        For each rank its "position" and "log_train", and "add_ons" where their entries differ. It is empty where one
        rank has saved alone.
    rank : int or None
        The rank whose values are in the state itself.
    """

    def __init__(self, world_size: int = 1, ranks: Sequence[Mapping[str, Any]] = (), rank: int | None = None) -> None:
        self.world_size = world_size
        self.ranks = list(ranks)
        self.rank = rank

    @classmethod
    def parse(cls, name: str, entry: Any) -> RankStates:
        """Return the object for an entry; None is the state of a single process."""
        if entry is None:
            return cls()
        if not (isinstance(entry, Mapping) and isinstance(entry.get("ranks"), list)):
            raise CheckpointMismatch(f"the state of {name} does not contain a list of ranks")
        return cls(int(entry["world_size"]), entry["ranks"], entry.get("rank"))

    def as_entry(self) -> dict[str, Any]:
        """Return the entry."""
        return {"world_size": self.world_size, "ranks": self.ranks, "rank": self.rank}

    # -------------------------------------------------------------------------------------------------- saving

    @staticmethod
    def own_part(state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the position and the log of a rank from its state; `read_state` adds the entries of add-ons."""
        return {"position": state["position"], "log_train": state["records"]["log_train"]}

    @classmethod
    def read_state(cls, trainer: Trainer, *, in_parts: bool, has_rows: bool = True) -> dict[str, Any]:
        """Return the state to save, with the entries of all ranks, which all call it, and with the rows of the history.

        Each rank has its parts of the tensors, or rank 0 alone has whole ones: those of the others are on the meta
        device. Of the entries that may differ from rank to rank, digests are compared first: only what differs is sent,
        and saved for each rank.
        """
        with state_mode(trainer, PARTS if has_rows else PARTS_WITHOUT_ROWS):
            state = dict(trainer.state_dict())
        if trainer.world_size == 1:
            return state
        name = engine_of(type(trainer))
        world = trainer.engine.dp_world_size
        varying = _varying_entries(type(trainer))
        for key, value in state.items():
            if key in varying or not in_parts:
                state[key] = trainer.engine.full_tensors(value, key in varying or trainer.is_main)
        if world == 1 or name not in state or len(state[name]["ranks"]) != world:
            return state
        own_entries: dict[str, Any] = {}
        for owner, keys in varying.items():
            if owner in state:
                own_entries[owner] = state[owner] if keys is None else {key: state[owner][key] for key in keys}
        digests = gather_dp(trainer.engine, {owner: digest(entry) for owner, entry in own_entries.items()})
        differing = [
            owner for owner in own_entries if any(of_rank.get(owner) != digests[0].get(owner) for of_rank in digests)
        ]
        entries: list[Any] = [{}] * world
        if differing:
            entries = gather_dp(trainer.engine, {owner: to_host(own_entries[owner]) for owner in differing})
        ranks = [{**rank, "add_ons": entry} for rank, entry in zip(state[name]["ranks"], entries, strict=True)]
        return {**state, name: {**state[name], "ranks": ranks}}

    # ------------------------------------------------------------------------------------------------- loading

    @classmethod
    def with_entries_of(cls, state: Mapping[str, Any], name: str, world: int, rank: int) -> dict[str, Any]:
        """Return a whole state with the entries of add-ons that this rank has saved."""
        ranks = _entries_of_ranks(state).get(name, {}).get("ranks", [])
        if not world == len(ranks) > 1:
            return dict(state)
        return {**state, **_complete(state, cls(world, ranks)._entries()[rank])}

    def state_for(
        self, trainer: Trainer, state: Mapping[str, Any], rank: int, world: int, *, is_known: bool
    ) -> dict[str, Any]:
        """Return a state as a rank continues from it; before its number is known, that of rank 0."""
        if self.world_size != world:
            if not state["position"].get("may_reshard"):
                ranks = f"{self.world_size} ranks that divide" if self.world_size > 1 else "1 rank that has all of"
                raise CheckpointMismatch(
                    f"the state was saved by {ranks} the data, and this run has {world}, which get other batches. Use "
                    f"{self.world_size}, write reshard=True (an option of StateManagerAddon) to distribute the rest of "
                    "the epoch again, or load only the weights: apply_weights(path)"
                )
            state = {**self._merge(state, rank), **self._merge_entries(trainer, state, rank)}
        elif is_known and len(self.ranks) == world:
            rank_state = self.ranks[rank]
            allowed = {key: value for key, value in state["position"].items() if key == "may_reshard"}
            records = {**state["records"], "log_train": rank_state["log_train"]}
            return {**state, "position": {**rank_state["position"], **allowed}, "records": records}
        return {**state, "position": derive_streams(state["position"], rank)}

    def _merge(self, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return a state for another number of ranks: rank 0 gets all records."""
        logs = [EpochLog("log_train") for _ in self.ranks]
        for log, rank_entry in zip(logs, self.ranks):
            log.load_state_dict(rank_entry["log_train"])
        records = dict(state["records"])
        if rank or logs:
            records["log_train"] = (EpochLog("log_train") if rank else merge_logs(logs)).state_dict()
        return {**state, "records": records, "position": {"ranks": self.world_size, **state["position"]}}

    def _merge_entries(self, trainer: Trainer, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return the entries for a rank of add-ons that can merge the entries of another number of ranks."""
        merged = {}
        for name, owner in _owners_that_merge(type(trainer)).items():
            common = state.get(name)
            if isinstance(common, Mapping):
                is_saved = self.ranks and all("add_ons" in saved for saved in self.ranks)
                # Those that were the same on all ranks are saved once.
                entries = [{**common, **entry.get(name, {})} for entry in self._entries()] if is_saved else [common]
                merged[name] = owner.merge_ranks(trainer, entries, rank)
        return merged

    def for_ranks(self, trainer: Trainer, state: Mapping[str, Any], world: int) -> RankStates:
        """Return the parts with which ranks that are still to be started begin: as saved, or merged."""
        if self.world_size == world:
            return self
        merged = [name for name in _owners_that_merge(type(trainer)) if isinstance(state.get(name), Mapping)]
        ranks = []
        for rank in range(world):
            rank_state = self.state_for(trainer, state, rank, world, is_known=True)
            ranks.append({**self.own_part(rank_state), "add_ons": {name: rank_state[name] for name in merged}})
        return RankStates(world, ranks, 0)

    def _entries(self) -> list[Mapping[str, Any]]:
        """Return the entries of add-ons that each rank has saved."""
        add_ons = []
        for saved in self.ranks:
            entries = saved.get("add_ons") if isinstance(saved, Mapping) else None
            add_ons.append(entries if isinstance(entries, Mapping) else {})
        return add_ons

    @classmethod
    def streams_in(cls, state: Mapping[str, Any], rank: int, world: int) -> Any:
        """Return the random streams of a rank, whatever engine has saved the state."""
        if world == 1:
            return state["position"]["present"]["random"]
        ranks = cls.parse("", next(iter(_entries_of_ranks(state).values()), None)).ranks
        if len(ranks) != world:
            raise CheckpointMismatch(
                f"start_with has 'random', but the checkpoint has the random streams of {len(ranks) or 1} ranks, and "
                f"this run has {world} ranks; leave 'random' out, or use as many ranks"
            )
        return ranks[rank]["position"]["present"]["random"]

    def warn_of_others(self, cls: type, rank: int, world: int) -> None:
        """Warn where add-ons get the state of another rank that may differ from what this rank held."""
        varying = sorted(_varying_entries(cls).keys() - {GENERATORS, USER_STATE})
        saved: set[str] = set()
        for entries in self._entries():
            saved.update(entries.keys() - {USER_STATE})
        names = sorted(saved - {GENERATORS} - _owners_that_merge(cls).keys())
        if any(entries.get(USER_STATE) for entries in self._entries()):  # It is there on several ranks, also empty.
            names.append("objects of the script")
        if names and len(self.ranks) != world and not rank:
            _log.warning(
                "the state of %s was saved for each of %d ranks and cannot be divided among %d: every rank begins with "
                "that of rank 0",
                ", ".join(names),
                len(self.ranks),
                world,
            )
        elif varying and self.rank not in (None, rank) and not all("add_ons" in saved for saved in self.ranks or [{}]):
            _log.warning(
                "rank %d takes the state of %s from rank %d: a state that one rank has read, or saved alone after an "
                "exception, does not hold what differs on the others",
                rank,
                ", ".join(varying),
                self.rank,
            )


def engine_of(cls: type, state: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the key of the parallel add-on of a trainer class, or of the add-on that has saved a state; else ""."""
    engine = slots_of(cls).get("parallel")
    if engine is None:
        return ""
    name = str(engine.__name__)
    if name in state:
        return name
    return next(iter(_entries_of_ranks(state)), name)  # Another engine has saved it.


def _entries_of_ranks(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the entry of the parallel add-on in a state, by its key; empty where one process has saved it."""
    entries = {key: entry for key, entry in state.items() if isinstance(entry, Mapping)}
    return {key: entry for key, entry in entries.items() if isinstance(entry.get("ranks"), list)}


def _of_one_process(trainer: Trainer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state that an engine has saved as a class without one continues from it: with all of the data."""
    for key, entry in _entries_of_ranks(state).items():
        if "world_size" in entry:
            other_entries = {name: value for name, value in state.items() if name != key}
            return RankStates.parse(key, entry).state_for(trainer, other_entries, 0, 1, is_known=False)
    return state


def load_from_file(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state that was read from a file, with this rank's own entries put in before any add-on takes its own."""
    name = engine_of(type(trainer), state)
    if not name:
        state = _of_one_process(trainer, state)
    states = RankStates.with_entries_of(state, name, trainer.engine.dp_world_size, trainer.engine.dp_rank)
    with state_mode(trainer, FROM_FILE):
        trainer.load_state_dict(states, strict)


def load_entries(trainer: Trainer, entries: Mapping[str, Any] | None) -> None:
    """Load only the add-on entries of this rank, into a trainer that was sent here with the entries of rank 0."""
    if not entries or trainer.rank == 0:
        return
    with state_mode(trainer, ENTRIES):
        state = trainer.state_dict()
        trainer.load_state_dict({**state, **_complete(state, entries)})


def between_epochs(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return a position between two epochs, for any loader."""
    present = {**position["present"], "generators": None, "parts": {}}
    return {**position, "begin": None, "present": present, "loader": None, "facts": {}}


def derive_streams(position: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Derive the random streams of a rank whose streams were not saved; rank 0 has the streams of the position."""
    if not rank:
        return {**position}
    present = {**position["present"], "random": random_state.of_rank(rank, position["present"]["random"])}
    return {**position, "present": present, "last_batch": None}  # Its own was another one.


def _owners_that_merge(cls: type) -> dict[str, Any]:
    """Map the names of the entries that another number of ranks merges to their classes."""
    return {owner.__name__: owner for owner in attributes_by_owner(cls) if "merge_ranks" in vars(owner)}


def _varying_entries(cls: type) -> dict[str, tuple[str, ...] | None]:
    """Map the entries that may differ from rank to rank to their keys that may; None for all of an entry."""
    varying: dict[str, tuple[str, ...] | None] = {GENERATORS: None, USER_STATE: None}
    for base in cls.__mro__:
        if not is_add_on(base):
            continue
        if names := tuple(base.__dict__.get("rank_state_attributes", ())):
            varying[base.__name__] = tuple(map(key_of, names))
        elif not is_of_zae(base) and "state_dict" in base.__dict__ and base not in attributes_by_owner(cls):
            varying[base.__name__] = None
    return varying


def _complete(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the entries of a rank: of an add-on with rank_state_attributes a rank has saved only these."""
    complete = {}
    for name, entry in entries.items():
        common = state.get(name)
        # What the user's objects hold is whole: rank 0 may have a value that this rank has not.
        if isinstance(common, Mapping) and isinstance(entry, Mapping) and name != USER_STATE:
            entry = {**common, **entry}
        complete[name] = entry
    return complete
