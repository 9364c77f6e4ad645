"""Numbers, durations and tables as text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zae.display.text import duration, fitting, number, table


@given(st.floats(-1e300, 1e300))
def test_a_number_keeps_its_value(value: float) -> None:
    """To four digits, or four decimals, in at most ten characters and the sign."""
    text = number(value)
    assert float(text) == pytest.approx(value, rel=5e-4, abs=5.1e-5 if abs(value) >= 0.01 else 1e-300)
    assert len(text.lstrip("-")) <= 10


def test_numbers_of_every_kind() -> None:
    """Whole numbers stay whole; numpy's are numbers too."""
    given = {1234567: "1234567", np.int64(7): "7", np.float32(0.25): "0.25", -0.0035: "-0.0035", True: "True",
             math.inf: "inf", 0.0: "0", 99999.7: "1e5", 0.99999: "1", 1000.0: "1000", "x": "x"}  # fmt: skip
    assert {value: number(value) for value in given} == given
    assert [duration(each) for each in (0, 59.6, 60, 3599.6, 360000)] == ["0.0s", "1m00s", "1m00s", "1h00m", "100h00m"]


def test_the_columns_that_fit() -> None:
    """Losses and validation come first, whatever their place."""
    names = ("epoch", "step", "train_loss", "train_acc", "lr", "valid_loss", "valid_acc", "time", "steps/s")
    widths = dict.fromkeys(names, 8)
    assert fitting(widths, 200) == list(names)
    assert fitting(widths, 79) == [name for name in names if name != "step"]
    assert fitting(widths, 50) == ["epoch", "train_loss", "valid_loss", "valid_acc", "time"]
    assert fitting(widths, 20) == ["epoch", "train_loss"]
    assert fitting(widths, 1) == ["epoch"]


def test_a_table_has_a_place_for_what_is_missing() -> None:
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 10, "loss": 12.345678, "late": 3}]
    assert table(rows, ["", "best"]).splitlines() == [
        "epoch    loss  late",
        "    1  0.5000     -",
        "   10  12.346     3  best",
    ]
