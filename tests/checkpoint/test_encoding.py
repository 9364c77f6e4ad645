"""A state must come back exactly, or be refused by name; a hostile one must be refused, whatever it is."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.json_text import strict_json
from zae.errors import CheckpointDamaged, CheckpointError

few = settings(max_examples=60, deadline=None, derandomize=True)

TORCH_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
]
NUMPY_DTYPES = ["<f8", ">f4", "<i8", "<u2", "|b1", "<c16", "<U3", "|S2", "<M8[ns]", "<m8[25us]", "<f2"]


def through_json(state: object) -> Any:
    """Encode, write, read and decode as a checkpoint does."""
    structure, tensors = encode(state)
    text = json.dumps(structure, allow_nan=False).encode()
    return decode(strict_json(text, "state.json"), tensors)


def same(one: Any, two: Any) -> bool:
    """Compare types, order and bits."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != two.dtype or one.shape != two.shape:
            return False
        whole = one.resolve_conj().contiguous().view(-1), two.contiguous().view(-1)
        return one.numel() == 0 or torch.equal(whole[0].view(torch.uint8), whole[1].view(torch.uint8))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype.str == two.dtype.str and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, dict):
        return len(one) == len(two) and all(
            same(*keys) and same(*values) for keys, values in zip(zip(one, two), zip(one.values(), two.values()))
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float):
        return math.isnan(one) == math.isnan(two) and (math.isnan(one) or (one, str(one)) == (two, str(two)))
    return bool(one == two)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    made = torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    made = made.reshape(shape)
    return made.transpose(0, -1) if shape and draw(st.booleans()) else made


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    size = math.prod(shape) * dtype.itemsize
    data = bytes(byte & 1 for byte in draw(st.binary(min_size=size, max_size=size)))
    made = np.frombuffer(data, dtype).reshape(shape).copy() if size else np.empty(shape, dtype)
    return made if shape else made[()]


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("$tuple")
keys = plain | st.tuples(plain, plain)
leaves = (
    plain
    | tensors()
    | arrays()
    | st.binary(max_size=5)
    | st.complex_numbers()
    | st.frozensets(st.integers())
    | st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([]), 2**63, -(2**500)])
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@few
@given(states)
def test_every_state_comes_back_exactly(state: object) -> None:
    assert same(through_json(state), state)


values = st.sampled_from([0.5, -0.0, math.nan, math.inf, 1e-310, 3, -1, 2**62, 2**63, True, False, None, "", "$tuple"])


@few
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("ab$c"), values), max_size=3), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_long_lists_of_records_come_back_exactly(rows: list[list[Any]], extra: int) -> None:
    """With every order of names, kind of record and mixture of types."""
    state = {"rows": [dict(rows[number % len(rows)]) for number in range(255 + extra)]}
    assert same(through_json(state), state)


def test_a_history_is_there_to_be_read() -> None:
    """What a run has logged is in every checkpoint, as plain JSON."""
    rows = [{"step": step, "train/loss": 1 / step, "lr": 1 if step < 9 else 0.1} for step in range(1, 5001)]
    assert encode({"log_history": rows}) == ({"log_history": rows}, {})


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_security_c6_tensors_of_every_dtype_shape_and_layout(dtype: torch.dtype) -> None:
    """Odd tensors come back bitwise."""
    base = torch.arange(12, dtype=torch.uint8).view(3, 4).to(torch.float32).to(dtype)
    state = {"two": base, "turned": base.t(), "none": base[:0], "one": base[0, 0], "row": base[1], "step": base[:, ::2]}
    made = through_json(state)
    assert same(made, state)
    assert [tensor.stride() for tensor in made.values()] == [tensor.stride() for tensor in state.values()]
    assert all(tensor.device.type == "cpu" for tensor in made.values())


def test_lazy_conjugates_are_not_taken_for_their_base() -> None:
    base = torch.tensor([1 + 2j, 3 - 1j])
    made = through_json([base, base.conj(), base.imag])
    assert made[0].tolist() == [1 + 2j, 3 - 1j]
    assert made[1].tolist() == [1 - 2j, 3 + 1j]
    assert made[2].tolist() == [2.0, -1.0]


def test_identical_views_are_stored_once_and_come_back_as_one() -> None:
    weight = torch.ones(4)
    structure, tensors = encode({"a": weight, "b": weight.detach(), "part": weight[:2]})
    assert sorted(tensors) == ["a", "part"]
    made = decode(structure, tensors)
    assert made["a"] is made["b"]
    assert made["part"].tolist() == [1.0, 1.0]


def test_parameters_become_tensors_and_share_no_graph() -> None:
    made = through_json({"w": torch.nn.Parameter(torch.ones(2))})["w"]
    assert type(made) is torch.Tensor
    assert not made.requires_grad


def test_tensor_names_are_readable_unique_and_safe() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2), "../x\x00": torch.ones(3), "__metadata__": torch.ones(4)}
    _, tensors = encode(state)
    assert list(tensors) == ["a.b", "a_b", "___x_", "__metadata__.2"]
    assert same(through_json(state), state)


def test_many_names_that_look_alike_take_no_time() -> None:
    state = {chr(0x4E00 + index): torch.ones(1) for index in range(5000)}
    assert list(encode(state)[1])[:3] == ["_", "_.2", "_.3"]


def test_the_states_that_training_has() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0),
    ]
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "rng": (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
            np.random.default_rng(3).__getstate__(),
        ),
    }
    made = through_json(state)
    assert same(made["optimizer"], state["optimizer"])
    assert isinstance(made["schedulers"][0]["milestones"], Counter)
    assert same(made, state)
    optimizer.load_state_dict(made["optimizer"])
    random.setstate(made["rng"][1])
    np.random.set_state(made["rng"][2])


Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class Pair(enum.Enum):
    BOTH = (1, 2)


def test_members_of_an_enum_are_kept_by_value() -> None:
    assert through_json({"a": Color.RED, "b": [enum.Enum("Word", {"ONE": "one"}).ONE]}) == {"a": 1, "b": ["one"]}


def test_a_deque_comes_back_with_its_limit() -> None:
    made = through_json({"a": deque([torch.ones(2), 1], maxlen=3), "b": deque()})
    assert (made["a"].maxlen, made["b"].maxlen) == (3, None)
    assert same(list(made["a"]), [torch.ones(2), 1])
    assert made["b"] == deque()


base = torch.arange(60.0).view(3, 4, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        base.permute(2, 0, 1),
        base[:, 1],
        base[:, ::2, 1::2],
        base[0].t()[1:],
        torch.arange(3.0).expand(5, 3),
        torch.arange(3.0)[:, None].expand(3, 5),
        torch.ones(4)[:1].expand(7, 7),
        torch.ones(6, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        base.to(torch.complex128).permute(1, 2, 0),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_the_order_of_memory_comes_back(tensor: torch.Tensor) -> None:
    """Twice in a state, it is one tensor again."""
    made = through_json({"a": tensor, "b": [tensor]})
    assert made["a"].stride() == tensor.stride()
    assert torch.equal(made["a"], tensor)
    assert made["b"][0] is made["a"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizer": {"state": {0: {"hook": print}}}}, r"optimizer\['state'\]\[0\]\['hook'\] is a builtin_function"),
        ({"a": [1, {2, 3}, lambda: 0]}, r"a\[2\] is a function; a checkpoint holds only numbers, text and tensors"),
        ({"a": Pair.BOTH}, r"a is a .*Pair; .* store its name"),
        ({"a": Point(1, 2)}, r"a is a .*Point; .* store tuple\(\.\.\.\)"),
        ({"a": defaultdict(int)}, r"a is a collections.defaultdict; .* store dict\(\.\.\.\)"),
        ({0: {"a b": torch.Generator()}}, r"state\[0\]\['a b'\] is a torch._C.Generator"),
        ({"a": np.array([print])}, r"a is a numpy array of dtype object"),
        ({"a": np.zeros(1, [("x", "f4")])}, r"a is a numpy array of dtype"),
        ({torch.ones(1): 1}, r"state has the key tensor\(\[1\.\]\), a torch.Tensor; keys in a checkpoint"),
        ({"a": {(1, (2, b"x")): 1}}, r"a has the key b'x', a bytes"),
        ({"a": torch.ones(2, device="meta")}, r"a is a Tensor on meta"),
        ({"a": torch.ones(2).to_sparse()}, r"a is a Tensor on cpu \(torch.sparse_coo\)"),
        ({"a": torch.nn.UninitializedParameter()}, r"a is a UninitializedParameter"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_by_its_path(state: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(state)


@pytest.mark.parametrize("key", ["a", 1])
def test_too_deep_or_endless_states_are_refused(key: Any) -> None:
    endless: dict[Any, Any] = {}
    endless[key] = endless
    with pytest.raises(CheckpointError, match="nested deeper than 200 levels, or contains itself"):
        encode(endless)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}])
def test_whatever_is_encoded_can_be_read(wrap: Any) -> None:
    state: Any = np.ones(1)
    while True:
        try:
            encode(state)
        except CheckpointError:
            break
        deepest, state = state, wrap(state)
    assert same(through_json(deepest), deepest)


TAGS = [
    "$tensor",
    "$array",
    "$scalar",
    "$bytes",
    "$tuple",
    "$deque",
    "$set",
    "$frozenset",
    "$size",
    "$dict",
    "$ordered",
]
TAGS += ["$counter", "$float", "$int", "$complex", "$dtype", "$device", "$code"]
hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["t", "<f8", "O", "float32", "int", "00"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*TAGS, "a"]), inner, max_size=2)
        | st.builds(lambda tag, value: {tag: value}, st.sampled_from(TAGS), inner)
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(hostile)
def test_a_hostile_structure_is_damage_and_no_other_error(structure: object) -> None:
    try:
        found = decode(structure, {"t": torch.ones(2)})
    except CheckpointDamaged:
        return
    assert not callable(found)


@pytest.mark.parametrize(
    "structure",
    [
        {"$tensor": "lost"},
        {"$tensor": ["t"]},
        {"$tensor": "t", "a": 1},
        {"$tensor": [["t"], None, None, None]},
        {"$tensor": ["lost", None, None, None]},
        {"$code": "print()"},
        {"$tensor": ["t", "complex128", None, None]},
        {"$tensor": ["f", "complex128", None, None]},
        {"$tensor": ["t", "load", None, None]},
        [{"$tensor": ["t", "uint8", None, None]}] * 2,
        {"$tensor": ["t", None, [0] * 100_000, [1] * 100_000]},
        {"$tensor": ["t", None, [1], [1]]},
        {"$tensor": ["t", None, [0], [-1]]},
        {"$tensor": ["f", None, [0], [1 << 40]]},
        {"$tensor": ["t", None, [0, 0], [1, 1]]},
        {"$tensor": ["t", None, [0], [1, 1]]},
        {"$tensor": ["t", None, None, [1]]},
        [{"$tensor": ["f", None, [0], [stride]]} for stride in (2, 3)],
        {"$array": [{"$tensor": "t"}, "|u1", [1] * 100_000]},
        {"$array": [{"$tensor": "t"}, "|O8", [1]]},
        {"$array": [{"$tensor": "t"}, "<f8,<f8", [1]]},
        {"$array": [{"$tensor": "t"}, "<f8", [-1]]},
        {"$array": [{"$tensor": "t"}, "<f8", [1 << 40, 1 << 40]]},
        {"$array": [{"$tensor": "f"}, "<f8", [2]]},
        {"$array": ["t", "<f8", [1]]},
        {"$array": {"$array": [{"$tensor": "t"}, "|u1", [1]]}},
        {"$tuple": {"$array": [{"$tensor": "t"}, "|u1", [1]]}},
        {"$set": {"$array": [{"$tensor": "t"}, "|u1", [1]]}},
        {"$complex": {"$tensor": "f"}},
        {"$scalar": ["<f8", "zz"]},
        {"$scalar": ["<f8", "00"]},
        {"$bytes": "a"},
        {"$bytes": 7},
        {"$deque": [[1], 3]},
        {"$deque": {"items": [1], "maxlen": -1}},
        {"$deque": {"items": [1], "maxlen": 1 << 62, "a": 1}},
        {"$deque": {"items": 1, "maxlen": None}},
        {"$deque": {}},
        {"$dict": [[[], 1]]},
        {"$dict": [[1, 1], [1, 2]]},
        {"$dict": [[1]]},
        {"$float": "1"},
        {"$int": "one"},
        {"$dtype": "nn"},
        {"$device": "moon"},
        {"$size": [True]},
        {"$set": [{"$tuple": [[]]}]},
        pytest.param(object(), id="object"),
        {1: 2},
    ],
    ids=lambda structure: str(structure)[:50],
)
def test_malformed_structures(structure: object) -> None:
    with pytest.raises(CheckpointDamaged, match=r"^state\.json: "):
        decode(structure, {"t": torch.ones(1, dtype=torch.uint8), "f": torch.zeros(2, dtype=torch.float64)})


def test_deep_structures_are_refused_without_recursion() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointDamaged, match="nested deeper than 200"):
        decode(deep, {})
    while deep:  # Python 3.11 recurses to free it otherwise
        deep = deep.pop()
