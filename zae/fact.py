"""Fact: one thing that a trainer, or an add-on, tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Fact"]


@dataclass(frozen=True)
class Fact:
    """One thing that a trainer, or an add-on, tells about itself in ``describe``.

    Plans, reports, loggers and checkpoints are told the same facts, and each makes its own text of them.

    Parameters
    ----------
    name : str
        What is told; in a plan, the beginning of a note.
    value : object
        A number or text, or a list or dict of them; True where the name says all, and None where there is nothing to
        tell. A function is given the ``RunPreview`` of a call of ``plan``, and returns the value: for what depends on
        the run, its ranks for instance, and for what takes long to find.
    unit : str
        Of a number, for instance "samples".
    where : str
        Where it acts: the name of a hook, or one of these.

        - "option", "optimizer", "trainer": how the trainer is made, which logs, reports and checkpoints record.
        - "ranks": how the processes divide the work. The name is an attribute of the RunPreview that is set.

    Examples
    --------
    >>> from zae.fact import Fact
    >>> str(Fact("may end earlier", "after 3 validations", where="should_stop"))
    'may end earlier: after 3 validations'
    >>> str(Fact("buffer", 4, "samples"))
    'buffer: 4 samples'
    """

    name: str
    value: Any = True
    unit: str = ""
    where: str = ""

    def __str__(self) -> str:
        if self.value is True:
            return self.name
        return f"{self.name}: {self.value} {self.unit}".rstrip()
