"""Decide when to save, what to keep, and what to resume from.

`checkpointer` saves, removes and finds the checkpoints of a run, by the rule for which stay, and the states of failed
runs; `saver` writes them, in the background too; `remote` in a file system of fsspec; `locks` keeps two runs out of one
folder; `resume` loads one into a run, or parts of it into a new one; `rank_states` is the part of a state that differs
from rank to rank; `save_trial` tries a state after the first step; `unsaved` warns of attributes that checkpoints lack.
"""
