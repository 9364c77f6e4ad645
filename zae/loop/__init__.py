"""The rest of a run beside its steps: limits, history, evaluation and state.

`run` limits, validates and counts; `progress` has the counters and limits; `step_output` reads what a step returned,
`epoch_log` keeps it, and `history` has the metrics; `nonfinite` guards the step; `evaluation` is validation and test;
`error_notes` says where an error was raised; `trainer_state` reads and loads the trainer's own state, and `addon_state`
that of its add-ons; `bases` has the bases of Trainer: what it shows of its parts, and the hooks of several ranks.
"""
