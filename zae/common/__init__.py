"""Functions that every package may use: devices, random streams, weights, argument checks.

`device` moves batches; `random_state` seeds, captures and restores; `model_weights` names and loads the weights of a
model; `argument_checks` checks arguments; `walk` finds what an object contains; `lazy` imports public names at their
first use; `torch_private` looks up private names of torch.
"""
