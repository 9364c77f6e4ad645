"""`python -m zae certify script.py:make_trainer`: prove the promises of zae for the trainer of a script."""

from zae.cli.certify.command import add_arguments, run

__all__ = ["add_arguments", "run"]
