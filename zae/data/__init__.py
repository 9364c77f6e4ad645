"""Data sources of a run, and the position of a run in them.

Public: `SeededDataset` draws the same random numbers in any worker.

`loaders` has what any loader says of itself, `loader_checks` refuses what is none, and `batch_limits` takes its first
batches. `position` resumes an epoch; `reading` has a class for each way to read a loader. `loader_parts` says what a
loader is made of; `loader_state` captures the states and random streams of these parts, `loader_values` what training
changes in them, and `streams` all of it, as an epoch began and now. `gather` builds batches of tensors in memory;
`sharding` gives each rank its loader, over the `shards` of the entries; `reshard` continues an epoch on another number
of ranks; `workers` keeps signals from loader workers, and handles those that die.
"""

from zae.data.seeded import SeededDataset

__all__ = ["SeededDataset"]
