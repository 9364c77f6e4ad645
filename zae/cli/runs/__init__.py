"""`python -m zae runs FOLDER`: draw the tree of the runs in a folder."""

from zae.cli.runs.command import add_arguments, run

__all__ = ["add_arguments", "run"]
