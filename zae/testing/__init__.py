"""The kit that checks an add-on: `check_addon` trains with it and names each fault and its cure."""

from zae.testing.kit import AddOnFault, Kit, PlainTask
from zae.testing.runner import CHECKS, check_addon

__all__ = ["CHECKS", "AddOnFault", "Kit", "PlainTask", "check_addon"]
