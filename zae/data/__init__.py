"""Loaders, and where a run stands in them.

`loading` walks a loader from its beginning or from a position; `loader_state` is what a checkpoint holds of a
loader; `gather` makes the batches of tensors in memory; `sharding` splits data between ranks; `reshard`
continues an epoch on another number of ranks; `workers` deals with loader workers that die.
"""
