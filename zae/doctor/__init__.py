"""Examine this machine, or the checkpoints of a run, and say what to do about what is wrong."""
