"""Data sources of a run, and the position of a run in them.

Public: `Mixture` and `MixtureStream` combine datasets by weights; `PackedDataset`, `pack` and `packed_collate` join
documents into rows; `LengthGroupedBatchSampler` builds batches of samples of similar length; `make_loaders` makes the
loaders of a run from datasets; `SeededDataset` draws the same random numbers in any worker.

`position` resumes an epoch; `skip` iterates over a loader from a batch on; `loader_state` captures and restores the
parts of a loader; `gather` builds batches of tensors in memory; `sharding` splits data between ranks; `reshard`
continues an epoch on another number of ranks; `workers` handles loader workers that draw, and those that die.
"""

from zae.common.lazy import load as _load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zae.data.length_groups import LengthGroupedBatchSampler, make_loaders
    from zae.data.mixture import Mixture, MixtureStream
    from zae.data.packing import PackedDataset, cu_seqlens, document_mask, flex_mask, pack, packed_collate
    from zae.data.workers import SeededDataset

__all__ = [
    "LengthGroupedBatchSampler",
    "Mixture",
    "MixtureStream",
    "PackedDataset",
    "SeededDataset",
    "cu_seqlens",
    "document_mask",
    "flex_mask",
    "make_loaders",
    "pack",
    "packed_collate",
]

_HOMES = {
    "LengthGroupedBatchSampler": "zae.data.length_groups",
    "Mixture": "zae.data.mixture",
    "MixtureStream": "zae.data.mixture",
    "SeededDataset": "zae.data.workers",
    "make_loaders": "zae.data.length_groups",
}  # All others are of packing.


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the loop does not need them."""
    if name not in __all__:
        raise AttributeError(f"module 'zae.data' has no attribute {name!r}")
    value = globals()[name] = _load(_HOMES.get(name, "zae.data.packing"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
