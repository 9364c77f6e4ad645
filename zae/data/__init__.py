"""Loaders, and the position of a run in them.

`position` resumes an epoch; `skip` iterates over a loader from a batch on; `loader_state` captures and restores the
parts of a loader; `gather` builds batches of tensors in memory; `sharding` splits data between ranks; `reshard`
continues an epoch on another number of ranks; `workers` handles loader workers that die.
"""
