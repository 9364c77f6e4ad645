"""The rest of a run beside its steps: limits, history, optimization, evaluation and state.

`run` limits, validates, counts and notes errors; `history` holds metrics; `evaluation` is validation and test; `state`
reads and loads the trainer's own state; `progress` counts and draws the bar; `nonfinite` guards the optimizer step;
`optimization` has optimizers and schedules; `step_output` reads what a step returned; `bases` has the bases of
Trainer: what it shows of its parts, and the seams of several ranks.
"""
