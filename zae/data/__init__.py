"""Data sources of a run, and the position of a run in them.

Public: `SeededDataset` draws the same random numbers in any worker.

`position` resumes an epoch; `reading` has a class for each way to read a loader. `loader_parts` says what a loader is
made of; `loader_state` captures the states and random streams of these parts, `loader_values` what training changes in
them, and `streams` all of it, as an epoch began and now. `gather` builds batches of tensors in memory; `sharding` gives
each rank its loader, over the `shards` of the entries; `reshard` continues an epoch on another number of ranks;
`workers` handles loader workers that draw, and those that die.
"""

from zae.lazy import load as _load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zae.data.workers import SeededDataset

__all__ = ["SeededDataset"]


def __getattr__(name: str) -> object:
    """Import `SeededDataset` when it is first asked for: the loop does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'zae.data' has no attribute {name!r}")
    value = globals()[name] = _load("zae.data.workers", name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
