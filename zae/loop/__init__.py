"""The rest of a run beside its steps: limits, history, optimization, evaluation and state.

`run` limits, validates, counts and notes errors; `progress` has the counters and limits; `step_output` reads what a
step returned, `epoch_log` keeps it, and `history` has the metrics; `optimization` has optimizers and schedulers, and
`nonfinite` guards their step; `evaluation` is validation and test; `state` reads and loads the trainer's own state, and
`addon_state` that of its add-ons; `bases` has the bases of Trainer: what it shows of its parts, and the hooks of
several ranks.
"""
