"""JSON from an author who is not trusted: no surprise, no deep recursion, no slow number."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.limits import within
from zae.checkpoint.json_text import strict_json
from zae.errors import CheckpointDamaged

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(plain | numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values, st.booleans())
def test_what_json_writes_is_read(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a pair, which only ASCII JSON can hold
        data = json.dumps(value).encode()
    assert strict_json(data, "x") == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} {}', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": 1, "b": {"a": 1, "a": 1}}', "the key 'a' stands twice"),
        (b"[NaN]", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"[1e999]", "beyond a float"),
        (b"1" * 1_000_000, "digits"),
        (b"[" * 201 + b"]" * 201, "nested deeper than 200"),
    ],
)
def test_security_c5_refused_with_the_file_and_the_reason(data: bytes, message: str) -> None:
    """Hostile JSON."""
    with pytest.raises(CheckpointDamaged, match=rf"^run/state\.json: .*{message}"):
        strict_json(data, "run/state.json")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'["' + b'\\"[' * 100_000 + b'",' + b"[" * 201,
        b'"' * 5_000_000,
        b'"' + b'\\"' * 5_000_000,
        b"\\" * 5_000_001 + b'"' + b"[" * 1000,
    ],
    ids=["lists", "dicts", "behind escapes", "quotes", "escaped quotes", "backslashes"],
)
def test_hostile_text_is_refused_in_time(data: bytes) -> None:
    with within(5.0), pytest.raises(CheckpointDamaged):
        strict_json(data, "x")


def test_brackets_inside_text_do_not_count() -> None:
    value = {"a": "[" * 500 + '\\"{{' + "\\" * 7 + '"', "b\\": ["[" * 300]}
    assert strict_json(json.dumps(value).encode(), "x") == value
    assert strict_json(b"[" * 200 + b"]" * 200, "x")
