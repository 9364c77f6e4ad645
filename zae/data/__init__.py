"""Data sources of a run, and the position of a run in them.

Public: `Mixture` combines datasets by weights; `PackedDataset`, `pack` and `packed_collate` join documents into rows;
`LengthGroupedBatchSampler` builds batches of samples of similar length; `SeededDataset` draws the same random numbers
in any worker.

`position` resumes an epoch; `skip` iterates over a loader from a batch on; `loader_state` captures and restores the
parts of a loader; `gather` builds batches of tensors in memory; `sharding` splits data between ranks; `reshard`
continues an epoch on another number of ranks; `workers` handles loader workers that draw, and those that die.
"""

from zae.common.lazy import load as _load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zae.data.length_groups import LengthGroupedBatchSampler
    from zae.data.mixture import Mixture
    from zae.data.packing import PackedDataset, cu_seqlens, document_mask, flex_mask, pack, packed_collate
    from zae.data.workers import SeededDataset

__all__ = [
    "LengthGroupedBatchSampler",
    "Mixture",
    "PackedDataset",
    "SeededDataset",
    "cu_seqlens",
    "document_mask",
    "flex_mask",
    "pack",
    "packed_collate",
]

_HOMES = {
    "LengthGroupedBatchSampler": "zae.data.length_groups",
    "Mixture": "zae.data.mixture",
    "SeededDataset": "zae.data.workers",
}  # All others are of packing.


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the loop does not need them."""
    if name not in __all__:
        raise AttributeError(f"module 'zae.data' has no attribute {name!r}")
    value = globals()[name] = _load(_HOMES.get(name, "zae.data.packing"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
