"""Decide when to save, what to keep, and what to resume from.

`checkpointer` saves, removes and finds the checkpoints of a run; `saver` writes them, in the background too; `locks`
keeps two runs out of one folder; `retention` is the rule for which stay; `resume` and `start_from` load one into a run;
`rank_states` is the part of a state that differs from rank to rank; `crash` saves a failed run; `unsaved` warns of
attributes that checkpoints lack.
"""
