"""What becomes of each script when it is killed, by hand: the truth that the verdicts are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

import kills_by_hand
from cases import CASES

KILL = 63
"""The optimizer step of the kill: the third epoch, or the second one of a script that saves less often."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_as_is_said(name: str, tmp_path: Path) -> None:
    """It ends with the weights of the run that was not killed, unless there is a cause."""
    case = CASES[name]
    for folder in ("whole", "killed"):
        command = case.command(tmp_path / folder)
    kill = {"save": 3} if case.in_save else {"step": KILL}
    same, whole, resumed = kills_by_hand.ends_the_same(command, tmp_path, case.resume_with, **kill)
    steps = whole[0][0]
    if case.cause == "cannot load":
        assert not resumed
    elif case.cause == "does not resume":
        assert resumed[0][0] == steps
    elif case.cause == "repeated work":
        assert resumed[0][0] + KILL > steps + 10
        assert not same
    else:
        assert same == (not case.cause)
        assert resumed[0][0] < steps
