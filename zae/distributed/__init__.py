"""Start and connect the processes of the ranks, and the engine that they have.

`spawn` starts and watches the processes, `launcher` joins those of torchrun; `rank_process` is the life of one;
`transfer` pickles what goes between them; `collectives` exchanges tensors and objects. `ranks` is the engine of ranks
that have joined, around which others are built. `stop_flag` and `drift` are what the ranks agree on, and which of them
has failed. `mesh` names the dimensions along which they divide the work; `blocks` and `shards` serve models of which
each rank holds a part.
"""
