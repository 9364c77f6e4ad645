"""Start and connect the processes of the ranks, and divide a model among them.

`spawn` starts and watches the processes, or joins those of torchrun; `rank_process` is the life of one; `transfer`
pickles what goes between them; `stop_flag` and `drift` are what they agree on. `mesh` names the dimensions along which
they divide the work; `ddp` wraps a model that each rank holds whole; `blocks`, `shards` and `meta_init` serve
models of which each rank holds a part.
"""
