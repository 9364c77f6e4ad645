"""What stands around the steps of a run.

`run` limits, validates and counts; `history` holds metrics; `evaluation` is validation and test; `state` reads
and loads the trainer's own state; `progress` counts; `nonfinite` guards the optimizer step; `binding` skips
idle add-ons; `step_output` reads what a step returned; `progress_bar`, `error_notes` and `stop_signals` are what a
user sees of a run and how it is stopped.
"""
