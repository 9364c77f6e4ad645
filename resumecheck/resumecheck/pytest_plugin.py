"""The fixture ``resumes`` of pytest: ``resumes("python train.py --epochs 2").is_the_same()``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .check import Options, Result, check

__all__ = ["resumes"]


@pytest.fixture
def resumes() -> Callable[..., Result]:
    """Check a command in the working folder; options are those of ``Options``.

    Examples
    --------
    >>> def test_resumes(resumes):
    ...     resumes("python train.py --epochs 2", horizon=10).is_the_same()
    """

    def run(command: str | Sequence[str], **options: Any) -> Result:
        words = shlex.split(command) if isinstance(command, str) else list(command)
        return check(words, Options(**options))

    return run
