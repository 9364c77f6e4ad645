"""Devices by every name, batches of every shape, and how many samples they have.

The device ``meta`` takes tensors on any machine, so what is moved and what is not can be told without a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import timeit
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from zae.device import parse_device, to_device
from zae.errors import ConfigError
from zae.values.walk import leading_dimension

CPU = torch.device("cpu")
META = torch.device("meta")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


# --- parse_device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["cpu", CPU, torch.device("cpu", 0), "cpu:0", ["cpu"], (CPU,)])
def test_cpu_by_every_name(spec: Any) -> None:
    assert parse_device(spec) == [CPU]


@pytest.mark.parametrize("spec", ["auto", None])
def test_auto_is_one_device_that_works(spec: Any) -> None:
    (device,) = parse_device(spec)
    assert parse_device() == [device]
    assert torch.ones(1, device=device).device == device
    if GPUS:
        assert device == torch.device("cuda", 0)


def test_a_list_has_a_device_for_each_rank() -> None:
    assert parse_device(["cpu", CPU]) == [CPU, CPU]
    assert parse_device(("cpu",) * 3) == [CPU] * 3


def test_auto_is_any_accelerator_that_torch_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA and MPS come first; one that is in this build of torch, and not on this machine, is passed over."""
    for kind in (torch.cuda, torch.backends.mps):
        monkeypatch.setattr(kind, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert parse_device("auto") == [CPU]
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert parse_device("auto") == parse_device(None) == [torch.device("xpu", 0)]
    assert parse_device("xpu:1") == [torch.device("xpu", 1)]


@pytest.mark.parametrize("spec", ["cuda", "cuda:0", 0, np.int64(0), torch.device("cuda"), torch.device("cuda", 0)])
def test_cuda_carries_its_index_or_is_refused_where_there_is_none(spec: Any) -> None:
    if GPUS:
        assert parse_device(spec) == [torch.device("cuda", 0)]
    else:
        with pytest.raises(ConfigError, match=r", but 0 CUDA devices are available; write device='cpu'$"):
            parse_device(spec)


def test_index_too_high_names_what_was_asked_and_what_is_there() -> None:
    there = f"{GPUS} CUDA device{' is' if GPUS == 1 else 's are'} available; write device="
    with pytest.raises(ConfigError) as caught:
        parse_device(f"cuda:{GPUS + 3}")
    assert str(caught.value).startswith(f"device='cuda:{GPUS + 3}', but {there}")
    with pytest.raises(ConfigError) as caught:
        parse_device(GPUS)
    assert str(caught.value).startswith(f"device={GPUS}, but {there}")
    with pytest.raises(ConfigError) as caught:
        parse_device([GPUS + 1, GPUS])
    assert str(caught.value).startswith(f"device[0]={GPUS + 1}, but {there}")


@pytest.mark.parametrize(
    "spec", ["", "quantum", "cuda:x", "cpu,cpu", "gpu", "gpu:1", "cdua:0", "CUDA:2", "cuda: 1", "CPU", "metal"]
)
def test_other_names(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"device={spec!r} is not a device.* 'auto', 'cpu', 'cuda:0' or 'mps'"):
        parse_device(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], r"device=\[\] names no device"),
        ((), r"device=\[\] names no device"),
        (-1, "device=-1 is not the index of a CUDA device; write device='cpu'"),
        (True, "device=True is a bool, not a device"),
        (1.0, "device=1.0 is a float, not a device"),
        ({"cpu"}, "is a set, not a device"),
        (["cpu", None], r"device\[1\]=None is a NoneType"),
        (["cpu", ["cpu"]], r"device\[1\]=\['cpu'\] is a list"),
        (["auto", "cpu"], r"device\[0\]='auto' is not a device; .*in a list one of the last three for each rank"),
        (["cpu", "cuda:0"], r"device=\['cpu', 'cuda:0'\] mixes cpu and cuda.*write for example device=\['cpu'\]"),
        ([0, CPU], r"device=\[0, 'cpu'\] mixes cuda and cpu"),
        (["cuda:0", "cuda:0"], r"names cuda:0 more than once.*write device=\['cuda:0'\]"),
        ([torch.device("cuda", 1), 0, "cuda"], r"names cuda:0 more than once.*write device=\['cuda:1', 'cuda:0'\]"),
        ("meta", "its tensors have no data"),
        ("hpu", "device='hpu', but 0 HPU devices are available"),
    ],
)
def test_what_cannot_be_meant(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_device(spec)


# --- to_device --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str = "n"
    twice: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Any
    late: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    y: int


class Encoding(collections.UserDict[str, Any]):
    """Moves as Hugging Face's BatchEncoding does: itself."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """A hand-written batch whose ``to`` changes it and returns nothing."""

    def __init__(self) -> None:
        self.nodes = torch.ones(3)
        self.waited: bool | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> None:
        self.nodes = self.nodes.to(device)
        self.waited = not non_blocking


class ReadOnly(Mapping[str, Any]):
    """A mapping that is made from a dict, and is not a dict."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class FromNothing(ReadOnly):
    """A mapping that cannot be made from a dict."""

    def __init__(self) -> None:
        super().__init__({"x": torch.ones(2)})


class Tagged(list[Any]):
    tag = "none"


class Triple(tuple[Any, ...]):
    """A tuple with its own constructor and an attribute."""

    source: str

    def __new__(cls, *, items: list[Any]) -> Triple:
        made = super().__new__(cls, items)
        made.source = "file"
        return made


class Color(enum.Enum):
    RED = 1


def test_nothing_to_move_is_the_same_object() -> None:
    x = torch.ones(2)
    batches: list[Any] = [
        x,
        (x, x),
        [x],
        {"x": x},
        {"a": [x, (x, "s")], "b": 3},
        Pair(x, 1),
        Sample(x),
        collections.OrderedDict(x=x),
        ReadOnly({"x": x}),
        Tagged([x]),
        (),
        [],
        {},
    ]
    for batch in batches:
        assert to_device(batch, CPU) is batch


@pytest.mark.parametrize(
    "leaf",
    ["text", b"bytes", 3, 2.5, None, True, np.ones(2), {1, 2}, range(3), Color.RED, torch.float32, CPU, Graph, Sample],
)
def test_what_is_no_tensor_passes_untouched(leaf: Any) -> None:
    assert to_device(leaf, META) is leaf
    moved = to_device([leaf, torch.ones(1)], META)
    assert moved[0] is leaf
    assert moved[1].device == META


def test_plain_containers_at_any_depth() -> None:
    x = torch.ones(2)
    batch: dict[str, Any] = {"a": [x, (x, {"b": x, "c": "s"})], "n": 1}
    moved = to_device(batch, META)
    assert type(moved) is dict
    assert type(moved["a"]) is list
    assert type(moved["a"][1]) is tuple
    assert moved["a"][0].device == moved["a"][1][0].device == moved["a"][1][1]["b"].device == META
    assert moved["a"][1][1]["c"] == "s"
    assert moved["n"] == 1
    assert batch["a"][0] is x
    assert batch["a"][1][0] is x
    assert batch["a"][1][1]["b"] is x


def test_only_what_moves_is_made_anew() -> None:
    still = ("a", 1)
    moved = to_device([still, torch.ones(1)], META)
    assert moved[0] is still


def test_named_tuple() -> None:
    batch = Pair(torch.ones(1), {"k": torch.ones(1)})
    moved = to_device(batch, META)
    assert type(moved) is Pair
    assert moved.left.device == moved.right["k"].device == META
    assert batch.left.device == CPU


def test_tuple_and_list_subclasses() -> None:
    triple = Triple(items=[torch.ones(1), 2, 3])
    moved = to_device(triple, META)
    assert type(moved) is Triple
    assert moved.source == "file"
    assert moved[0].device == META
    assert moved[1:] == (2, 3)
    tagged = Tagged([torch.ones(1)])
    tagged.tag = "train"
    moved = to_device(tagged, META)
    assert type(moved) is Tagged
    assert moved.tag == "train"
    assert moved[0].device == META
    assert tagged[0].device == CPU
    largest = torch.max(torch.ones(2, 2), 1)
    moved = to_device(largest, META)
    assert type(moved) is type(largest)
    assert moved.values.device == moved.indices.device == META
    assert to_device(torch.Size([1, 2]), META) == torch.Size([1, 2])


def test_dict_subclasses() -> None:
    ordered: collections.OrderedDict[str, Any] = collections.OrderedDict(z=torch.ones(1), a=1)
    moved = to_device(ordered, META)
    assert type(moved) is collections.OrderedDict
    assert list(moved) == ["z", "a"]
    assert moved["z"].device == META
    default: collections.defaultdict[str, Any] = collections.defaultdict(list, x=torch.ones(1))
    moved = to_device(default, META)
    assert type(moved) is collections.defaultdict
    assert moved.default_factory is list
    assert moved["x"].device == META
    assert ordered["z"].device == default["x"].device == CPU


def test_other_mappings() -> None:
    batch = ReadOnly({"x": torch.ones(1)})
    moved = to_device(batch, META)
    assert type(moved) is ReadOnly
    assert moved["x"].device == META
    assert batch["x"].device == CPU
    proxy = types.MappingProxyType({"x": torch.ones(1)})
    moved = to_device(proxy, META)
    assert type(moved) is types.MappingProxyType
    assert moved["x"].device == META
    moved = to_device(FromNothing(), META)
    assert type(moved) is dict
    assert moved["x"].device == META


def test_dataclass() -> None:
    batch = Sample(torch.ones(2))
    batch.twice = torch.full((2,), 7.0)  # __post_init__ must not run again
    moved = to_device(batch, META)
    assert type(moved) is Sample
    assert moved.name == "n"
    assert moved.x.device == moved.twice.device == META
    assert batch.x.device == batch.twice.device == CPU


def test_frozen_dataclass() -> None:
    batch = Frozen(torch.ones(2), [torch.ones(1)])  # "late" has no value yet
    moved = to_device(batch, META)
    assert moved.x.device == moved.inner[0].device == META
    assert not hasattr(moved, "late")
    object.__setattr__(batch, "late", torch.ones(1))
    assert to_device(batch, META).late.device == META
    assert batch.late.device == batch.x.device == batch.inner[0].device == CPU
    slotted = Slotted(torch.ones(1), 4)
    assert to_device(slotted, META).x.device == META
    assert to_device(slotted, META).y == 4
    assert slotted.x.device == CPU


def test_object_that_moves_itself() -> None:
    encoding = Encoding(ids=torch.ones(2))
    moved = to_device(encoding, META)
    assert type(moved) is Encoding
    assert moved["ids"].device == META
    assert encoding["ids"].device == CPU
    graph = Graph()
    moved = to_device({"graph": graph}, META)["graph"]
    assert type(moved) is Graph
    assert moved.nodes.device == META
    assert moved.waited is True
    assert graph.nodes.device == CPU
    assert graph.waited is None


def test_non_blocking_reaches_those_that_take_it() -> None:
    assert to_device(Graph(), META, non_blocking=True).waited is False
    assert to_device(Encoding(ids=torch.ones(2)), META, non_blocking=True)["ids"].device == META
    assert to_device((torch.ones(1),), META, non_blocking=True)[0].device == META


def test_object_that_cannot_be_copied_is_moved_all_the_same() -> None:
    class Single:
        def __copy__(self) -> Single:
            raise RuntimeError("there is one of me")

        def to(self, device: torch.device) -> str:
            return f"on {device}"

    assert to_device(Single(), META) == "on meta"


def test_an_error_inside_of_to_comes_through() -> None:
    class Broken:
        def to(self, device: torch.device) -> None:
            raise LookupError("no such place")

    with pytest.raises(LookupError, match="no such place"):
        to_device([Broken()], CPU)


def test_a_field_named_to_is_no_method() -> None:
    Edge = collections.namedtuple("Edge", ["source", "to"])
    moved = to_device(Edge(torch.ones(1), torch.ones(1)), META)
    assert type(moved) is Edge
    assert moved.source.device == moved.to.device == META


def test_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device(packed, CPU) is packed
    moved = to_device(packed, META)
    assert type(moved) is type(packed)
    assert moved.data.device == META
    assert packed.data.device == CPU


def test_parameters_and_gradients_survive() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert to_device([weight], CPU)[0] is weight
    moved = to_device([weight * 2], META)[0]
    assert moved.requires_grad
    assert moved.grad_fn is not None


def test_the_common_case_costs_next_to_nothing() -> None:
    batch = (torch.ones(4, 3), torch.ones(4))
    for call in (lambda: to_device(batch, CPU), lambda: leading_dimension(batch)):
        best = min(timeit.repeat(call, number=2000, repeat=20)) / 2000
        assert best < 3e-6  # 0.3 microseconds on an idle core


# --- leading_dimension ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        ((torch.ones(5, 2), torch.ones(3)), 5),
        ([torch.ones(0, 2)], 0),
        ((torch.tensor(1.0), torch.ones(4)), 4),
        ({"id": ["a", "b"], "x": torch.ones(6), "y": torch.ones(7)}, 6),
        (collections.OrderedDict(y=torch.ones(7), x=torch.ones(6)), 7),
        ((np.ones((3, 2)), torch.ones(4)), 3),
        ((np.float64(1.0), np.array(2.0), torch.ones(4)), 4),
        ((((), []), {}, {"k": ("s", [torch.ones(9)])}), 9),
        (Pair(torch.ones(2), torch.ones(3)), 2),
        (Sample(torch.ones(8)), 8),
        (Encoding(ids=torch.ones(2, 5)), 2),
        (ReadOnly({"x": torch.ones(3)}), 3),
        (torch.nn.Parameter(torch.ones(4)), 4),
        (pack_sequence([torch.ones(3), torch.ones(2), torch.ones(1)]), 3),
        (torch.tensor(1.0), None),
        ((torch.tensor(1.0),), None),
        ("text", None),
        (None, None),
        (3, None),
        ((), None),
        ({}, None),
        (Graph(), None),
        (Sample, None),
    ],
)
def test_leading_dimension(batch: Any, size: int | None) -> None:
    found = leading_dimension(batch)
    assert found == size
    assert found is None or type(found) is int


def test_leading_dimension_of_a_nested_tensor() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert leading_dimension((ragged,)) == 2
