"""Divide a model into stages that several ranks compute one after the other, on parts of each batch.

`chain` finds the stages of a model, `tracing` what the forward of a container computes, and `division` gives each rank
its stages. `schedules` are those of torch.distributed.pipelining; `runner` runs a step of a user through one, and
`rows` takes batches apart and puts results together. `parts` makes states whole.
"""
