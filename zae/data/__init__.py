"""Data sources of a run, and the position of a run in them.

Public: `SeededDataset` draws the same random numbers in any worker.

    loaders         what any loader says of itself, and copies with another order
    loader_checks   refuse what is no loader, or ends too early
    batch_limits    the first batches of a loader
    gather          batches of tensors in memory, built without fetching single samples
    seeded          random numbers of samples that depend on no worker
    workers         processes of a loader: signals, deaths, epochs

    position        how far a run is in its loader, and how an epoch is resumed
    reading         one class for each way to read a loader
    batch_digests   recognise the batch that was used last, and that epochs begin with
    streams         what the batches follow from, as the epoch began and now
    loader_parts    what a loader is made of: samplers, datasets, the collate function
    loader_state    the states and random streams of these parts
    loader_values   what training changes in these parts

    sharding        the loader of one rank
    shards          which entries a rank gets in each step
    reshard         an epoch goes on with another number of ranks, or another batch size
"""

from zae.data.seeded import SeededDataset

__all__ = ["SeededDataset"]
