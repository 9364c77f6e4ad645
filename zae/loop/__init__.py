"""The rest of a run beside its steps, in the order to read it.

A call of `Trainer.run`: `run`, with `limits` (where it ends), `progress` (its counters), `cadence` (at which counts
something is due), `requests` (what is asked of it between two steps), `continuation` (it goes back to an earlier
state), `activity` (what it is doing at a moment) and `own_loop` (a `run_epoch` of the user's own).

What a step returned: `step_output` reads it, with `step_remarks`, `epoch_log` and `series` keep it, `history` has the
rows of metrics (`metric_rows`), and `recording` fills that. `nonfinite` guards the step; `first_step` and `first_epoch`
look at the first ones.

Evaluation: `validation` within a run, `evaluation` of any loader, and `predictions`.

State: `trainer_state`, `addon_state`, `user_state` with `loaded_parts`, `rank_states`, and `older_states` for those of
older versions.

`processes` is the base of Trainer, `run_view` what a display asks for, and `error_notes` says where an error was
raised.
"""
