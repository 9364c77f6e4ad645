"""`python -m zae replay script.py:make_trainer --step N`: run to a step of a run again, and show what happens in it."""

from zae.cli.replay.command import add_arguments, run

__all__ = ["add_arguments", "run"]
