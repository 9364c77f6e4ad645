"""Save and resume: the checkpoints of a run."""
