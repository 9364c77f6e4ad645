"""Each kind of value comes back from a checkpoint as it was, and its mark moves with each change."""

from __future__ import annotations

import copy
import enum
import io
import json
import math
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.json_text import strict_json
from zae.errors import CheckpointMismatch
from zae.random_state import read_stream
from zae.user_state.marks import LARGE, mark_of
from zae.user_state.values import Absent, Maker, NotSaved, Packer, fill
from zae.values.walk import has_same_bits

HOST = torch.device("cpu")
Transition = namedtuple("Transition", ("state", "reward"))


class Phase(enum.Enum):
    WARM = "warm"
    FULL = "full"


class Number(int):
    pass


class Pair(NamedTuple):
    left: int
    right: Any


def graph() -> torch.Tensor:
    weight = torch.ones(3, requires_grad=True)
    return weight * 2


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bool": lambda: True,
    "int": lambda: 2**80,
    "float": lambda: -0.0,
    "nan": lambda: math.nan,
    "complex": lambda: 1 + 2j,
    "text": lambda: "Zoë \ud800 \x00",
    "bytes": lambda: b"\x00\xff",
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([2, 3]),
    "scalar": lambda: np.float32(0.1),
    "path": lambda: Path("a") / "b",
    "member": lambda: Phase.FULL,
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "no elements": lambda: torch.empty(0, 3),
    "no dimensions": lambda: torch.tensor(2.5),
    "with a graph": lambda: graph().detach(),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "expanded": lambda: torch.ones(1).expand(10**6, 10**6),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "complex tensor": lambda: torch.ones(3, dtype=torch.complex128),
    "conjugate view": lambda: torch.tensor([1 + 2j]).conj(),
    "one element with a stride": lambda: torch.tensor([1 + 2j]).conj().imag,
    "float8": lambda: torch.ones(4).to(torch.float8_e5m2),
    "array": lambda: np.arange(6).reshape(2, 3),
    "array of text": lambda: np.array(["a", "bc"]),
    "array of dates": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
    "list": lambda: [1, "a", [None, 2.0]],
    "list that looks like a form": lambda: ["tensor", 1],
    "tuple": lambda: (1, (2, torch.ones(1))),
    "set": lambda: {1, "a", (2, 3)},
    "frozenset": lambda: frozenset({1, 2}),
    "deque": lambda: deque([1, 2, 3], maxlen=5),
    "dict": lambda: {1: "a", "b": [2], (1, 2): None, Phase.WARM: 3, np.int64(4): 5},
    "dict that looks like a form": lambda: {"$tensor": "x"},
    "ordered": lambda: OrderedDict([("b", 1), ("a", 2)]),
    "counter": lambda: Counter("abca"),
    "default": lambda: defaultdict(list, {"a": [1]}),
    "named tuple": lambda: Transition(torch.ones(2), 1.0),
    "typed named tuple": lambda: Pair(1, [2]),
    "queue of named tuples": lambda: deque([Transition(torch.full((2,), float(i)), i) for i in range(3)], maxlen=3),
    "state dict": lambda: nn.Linear(2, 1).state_dict(),
}


def written(value: Any) -> Any:
    """Return the form of a value after a file."""
    form = Packer({}, {}, HOST).write(("task", "value"), value)
    structure, tensors = encode(form)
    return decode(strict_json(json.dumps(structure, allow_nan=False).encode(), "state.json"), tensors)


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_comes_back(kind: str) -> None:
    value = VALUES[kind]()
    made = Maker({}, {}, HOST).read(written(value), None)
    assert type(made) is type(value)
    assert has_same_bits(made, value) if kind != "expanded" else (made.shape == value.shape and made.stride() == (0, 0))
    if isinstance(made, defaultdict):
        assert made.default_factory is list


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_has_the_mark_of_its_copy(kind: str) -> None:
    value = VALUES[kind]()
    assert mark_of(value) == mark_of(value)
    if kind not in ("set", "frozenset"):  # Their order is that in which they were filled.
        assert mark_of(copy.deepcopy(value)) == mark_of(value)


CHANGES: dict[str, tuple[Any, Any]] = {
    "int to bool": (1, True),
    "int to float": (1, 1.0),
    "sign of zero": (0.0, -0.0),
    "numbers with one hash": ([-1], [-2]),
    "numbers with one hash in a long list": ([*range(10_000), -1], [*range(10_000), -2]),
    "one in the middle of a long list": ([0] * 10_000, [0] * 5_000 + [1] + [0] * 4_999),
    "type within": ([1, 2], [1, 2.0]),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "length of a deque": (deque([1], maxlen=2), deque([1], maxlen=3)),
    "shape": (torch.zeros(6), torch.zeros(2, 3)),
    "type of a tensor": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "one bit of a large tensor": (torch.zeros(LARGE), torch.zeros(LARGE).index_fill(0, torch.tensor([77_777]), 1e-30)),
    "one row of a large array": (np.zeros((2000, 1000)), np.concatenate([np.zeros((1999, 1000)), np.ones((1, 1000))])),
    "the end of a large array": (np.zeros(LARGE + 3, np.int8), np.append(np.zeros(LARGE + 2, np.int8), np.int8(1))),
    "deep": ([{"a": [torch.zeros(1)]}], [{"a": [torch.ones(1)]}]),
    "text": (["a" * 100], ["a" * 99 + "b"]),
    "conjugate view": (torch.tensor([1j]).conj(), torch.tensor([2j]).conj()),
    "type that NumPy lacks": (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    "one element with a stride": (torch.zeros(1).expand(3), torch.ones(1).expand(3)),
    "nested tensor": tuple(torch.nested.nested_tensor([torch.zeros(1), torch.full((2,), x)]) for x in (1.0, 2.0)),
    "decimal": (Decimal("1.10"), Decimal("1.1")),
    "time": (datetime(2020, 1, 1), datetime(2020, 1, 2)),
    "range": (range(3), range(4)),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "memory": (memoryview(b"a"), memoryview(b"b")),
    "array of Python": (array("d", [1.0]), array("d", [2.0])),
    "number of a class": (Number(1), Number(2)),
    "arguments of a function": (partial(pow, 2), partial(pow, 3)),
    "file in memory": (io.BytesIO(b"a"), io.BytesIO(b"b")),
    "bits of a generator": (np.random.PCG64(0), np.random.PCG64(1)),
    "table": (pandas.DataFrame({"a": [1, 2]}), pandas.DataFrame({"a": [1, 3]})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_moves_the_mark(change: str) -> None:
    before, after = CHANGES[change]
    assert mark_of(before) == mark_of(before)
    assert mark_of(before) != mark_of(after)


def test_a_write_through_data_moves_the_mark() -> None:
    """It moves no version of the tensor, and is how averages are written."""
    large = torch.zeros(LARGE)
    before = mark_of(large)
    large.data[5] = 1.0
    assert mark_of(large) != before


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda: np.random.Generator(np.random.Philox(3)),
        lambda: np.random.RandomState(3),
        lambda: random.Random(3),
        lambda: torch.Generator().manual_seed(3),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_stream_goes_on(make: Callable[[], Any], is_there: bool) -> None:
    """In the object that is there; one that training has made is made again."""
    stream, present = make(), make() if is_there else None
    before = mark_of(stream)
    draw = lambda each: torch.rand(3, generator=each).tolist() if isinstance(each, torch.Generator) else each.random()  # noqa: E731
    draw(stream)
    assert mark_of(stream) != before
    made = Maker({}, {}, HOST).read(written(stream), present)
    assert made is present or not is_there
    assert repr(read_stream(made)) == repr(read_stream(stream))
    assert draw(made) == draw(stream)


FILLED: dict[str, tuple[Any, Any]] = {
    "tensor": (torch.zeros(2), torch.ones(2)),
    "array": (np.zeros(2), np.ones(2)),
    "list": ([1], [2, 3]),
    "dict": ({1: 2}, {3: 4}),
    "default": (defaultdict(int), defaultdict(int, {3: 4})),
    "set": ({1}, {2}),
    "deque": (deque([1], maxlen=2), deque([2], maxlen=2)),
    "counter": (Counter("a"), Counter("b")),
}


@pytest.mark.parametrize("kind", FILLED)
def test_an_object_is_filled_in_its_place(kind: str) -> None:
    present, value = copy.deepcopy(FILLED[kind])
    assert fill(present, value)
    assert has_same_bits(present, value)


@pytest.mark.parametrize(
    ("present", "value"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(1).expand(4), torch.ones(4)),
        (np.zeros(2), np.zeros(3)),
        (deque(maxlen=1), deque(maxlen=2)),
        ([1], (1,)),
        ((1,), (2,)),
        (1, 2),
    ],
)
def test_another_object_takes_the_place_of_what_cannot_be_filled(present: Any, value: Any) -> None:
    assert not fill(present, value)


def test_a_leaf_of_a_graph_is_one_again() -> None:
    for value in (torch.zeros(1, requires_grad=True), nn.Parameter(torch.zeros(1))):
        made = Maker({}, {}, HOST).read(written(value), None)
        assert type(made) is type(value)
        assert made.requires_grad
        assert made.is_leaf


class Own:
    pass


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        Own,
        lambda: [Own()],
        lambda: {"a": Own()},
        lambda: lambda: 0,
        lambda: iter([1]),
        lambda: torch.zeros(2).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        lambda: torch.zeros(2).as_subclass(Tagged),
        lambda: np.array([Own()]),
        lambda: type("Local", (Pair,), {})(1, 2),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(NotSaved):
        written(make())


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotSaved, match="contains itself"):
        written(endless)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("value", "hf_abcdefghijklmnopqrstuvwxyz"),
        ("api_key", "abcdefgh"),
        ("value", {"password": "abcdefgh"}),
        ("value", ["x", {"deep": {"token": "abcdefgh"}}]),
        ("value", "https://me:secret@host/path"),
    ],
)
def test_a_secret_is_refused(key: str, value: Any) -> None:
    with pytest.raises(NotSaved, match="a secret"):
        Packer({}, {}, HOST).write(("task", key), value)


@pytest.mark.parametrize(
    "form",
    [
        ["os.system", "true"],
        ["named", "os:stat_result", [1]],
        ["named", "subprocess:Popen", [1]],
        ["member", "builtins:int", "real"],
        ["member", "tests.kit:Phase", "__class__"],
        ["stream", "Generator", "default_rng", {}],
        ["stream", "Popen", "", {}],
        ["tensor", "name", True],
        ["object", "task.model"],
        ["same", "task", "other"],
        ["list", 1],
        ["dict", [[1]]],
        {"list": []},
        [],
        [["list"]],
    ],
)
def test_a_form_of_a_hostile_checkpoint_makes_nothing(form: Any) -> None:
    """No function of the checkpoint's choice is called: it is refused, or what it refers to is absent."""
    with pytest.raises((CheckpointMismatch, Absent, TypeError, ValueError, LookupError)):
        Maker({}, {}, HOST).read(form, None)
