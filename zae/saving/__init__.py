"""When to save, what to keep, and what to resume from.

`saver` writes checkpoints, in the background too; `retention` decides which stay; `resume` finds the one to
resume from; `crash` saves a failed run; `unsaved` warns of attributes that no checkpoint holds.
"""
