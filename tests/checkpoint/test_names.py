"""Names on the disk: made, recognised, and told from others'."""

from __future__ import annotations

import os

import pytest

from zae.checkpoint import names
from zae.checkpoint.names import aside_name, checkpoint_name, is_abandoned, set_aside, staging_name, step_of
from zae.errors import ConfigError


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 100_000_000, 10**15])
def test_steps_come_back(step: int) -> None:
    assert step_of(checkpoint_name(step)) == step


def test_a_negative_step() -> None:
    with pytest.raises(ConfigError, match="step is -1"):
        checkpoint_name(-1)


@pytest.mark.parametrize("name", ["best", "step-00000001", "a-b-c", "step-1-2"])
def test_hidden_names_keep_the_name(name: str) -> None:
    assert set_aside(aside_name(name, "replaced"), "replaced") == name
    assert set_aside(aside_name(name, "replaced"), "deleting") is None
    assert is_abandoned(staging_name(name), 0.0)


def test_who_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = staging_name("x")
    other = name.replace(f"-{os.getpid()}-", "-12345-")

    assert is_abandoned(name.replace(f"-{os.getpid()}-", f"-{10**30}-"), 0.0)

    def killer(error: type[OSError] | None) -> None:
        def kill(pid: int, signal: int) -> None:
            assert (pid, signal) == (12345, 0)
            if error is not None:
                raise error

        monkeypatch.setattr(os, "kill", kill)

    for error, gone in ((None, False), (PermissionError, False), (ProcessLookupError, True)):
        killer(error)
        assert is_abandoned(other, 0.0) is gone
        assert is_abandoned(other, 25 * 3600.0)
    monkeypatch.setattr(names, "_host", lambda: "00000000")
    assert not is_abandoned(name, 0.0)
    assert is_abandoned(name, 25 * 3600.0)
