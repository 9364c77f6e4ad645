"""`python -m zae doctor`: examine this machine, or the checkpoints of a run."""

from zae.cli.doctor.checkpoints import add_arguments, examine, folders_below, run

__all__ = ["add_arguments", "examine", "folders_below", "run"]
