"""The two files of tensors: read by everybody's tools, tied where they were tied, and safe to open."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kit.limits import within
from zae.checkpoint.ckpt_files import read_ckpt, write_ckpt
from zae.checkpoint.hashed_files import Input, open_input
from zae.checkpoint.tensor_bytes import DTYPES
from zae.checkpoint.tensor_files import read_safetensors, write_safetensors
from zae.errors import CheckpointDamaged, CheckpointError


def written(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file."""
    stream = io.BytesIO()
    write_safetensors(stream.write, tensors, metadata)
    return stream.getvalue()


def read(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file."""
    path = Path("model.safetensors")
    path.write_bytes(data)
    with open_input(path) as source:
        return read_safetensors(source)


def saved(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a .ckpt file."""
    stream = io.BytesIO()
    write_ckpt(stream.write, tensors)
    return stream.getvalue()


class Tied(nn.Module):
    """A model whose head is its embedding, with a buffer that is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def some(dtype: torch.dtype) -> Tensor:
    """Return a tensor of a dtype."""
    return torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=torch.uint8).float().to(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_by_safetensors_and_back(name: str) -> None:
    dtype = DTYPES[name]
    state = {"b": some(dtype), "a": some(dtype).t(), "one": some(dtype)[0, 0], "none": some(dtype)[:0]}
    data = written(state, {"step": "3"})
    ours, notes = read(data)
    assert notes == {"format": "pt", "step": "3"}
    for made in (ours, read(safetensors.torch.save({key: value.contiguous() for key, value in state.items()}))[0]):
        for key, value in state.items():
            assert made[key].dtype is dtype
            assert made[key].shape == value.shape
            assert (
                made[key].view(-1).view(torch.uint8).tolist() == value.contiguous().view(-1).view(torch.uint8).tolist()
            )
    if name != "F8_E8M0":  # which safetensors.torch.load has no entry for
        theirs = safetensors.torch.load(data)
        assert all(theirs[key].shape == value.shape for key, value in state.items())


def test_tensors_start_at_multiples_of_their_element_size() -> None:
    data = written({"a": some(torch.bool), "b": some(torch.float64), "c": some(torch.bfloat16)})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert [header[name]["data_offsets"][0] % DTYPES[header[name]["dtype"]].itemsize for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize("write", [written, saved])
def test_tied_weights_are_written_once_and_stay_tied(write: Callable[..., bytes], tmp_path: Path) -> None:
    model = Tied()
    data = write(model.state_dict())
    path = tmp_path / "model"
    path.write_bytes(data)
    state = read(data)[0] if write is written else read_ckpt(data, "model.ckpt")
    assert state.keys() == model.state_dict().keys()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert data.count(model.embed.weight.detach().numpy().tobytes()) == 1
    other = Tied()
    other.load_state_dict(state)
    assert other.head.weight.data_ptr() == other.embed.weight.data_ptr()
    assert torch.equal(other.head.weight, model.embed.weight)
    if write is written:
        third = Tied()
        assert safetensors.torch.load_model(third, path) == (set(), [])
        assert torch.equal(third.head.weight, model.embed.weight)
        assert third.head.weight.data_ptr() == third.embed.weight.data_ptr()


def test_files_of_safetensors_save_model_are_tied_again(tmp_path: Path) -> None:
    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "m"), {"author": "somebody"})
    state, notes = read((tmp_path / "m").read_bytes())
    assert state.keys() == model.state_dict().keys()
    assert state["head.weight"] is state["embed.weight"]
    assert notes == {"author": "somebody"}


@pytest.mark.parametrize("write", [written, saved])
def test_overlapping_views_are_written_each(write: Callable[..., bytes]) -> None:
    base = torch.arange(1000.0)
    state = {"row": base[:3], "other": base[1:4], "turned": base[:6].view(2, 3).t(), "same": base[:3]}
    data = write(state)
    made = read(data)[0] if write is written else read_ckpt(data, "x")
    assert {key: value.tolist() for key, value in made.items()} == {key: value.tolist() for key, value in state.items()}
    assert made["same"].data_ptr() == made["row"].data_ptr()
    assert len(data) < 3000  # the memory behind the views is not written


def test_a_note_that_looks_like_a_tie_is_none() -> None:
    weight = torch.ones(1)
    state, notes = read(written({"w": weight, "v": weight}, {"author": "w"}))
    assert list(state) == ["w", "v"]
    assert notes == {"format": "pt", "author": "w"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": torch.ones(1, dtype=torch.complex128)}, "'w' is of torch.complex128, .* save it as .ckpt"),
        ({"w": torch.ones(1).to_sparse()}, "w is a Tensor on cpu"),
        ({"w": {"a": 1}}, "contains a dict at 'w'; expected a tensor: .*get_extra_state"),
        ({"__metadata__": torch.ones(1)}, "the key '__metadata__', which files cannot hold"),
        ({"\ud800": torch.ones(1)}, "which files cannot hold"),
        ({3: torch.ones(1)}, "the key 3, which files cannot hold"),
    ],
)
def test_what_a_file_cannot_hold(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        written(state)


def test_ckpt_holds_what_safetensors_cannot() -> None:
    made = read_ckpt(saved({"w": torch.ones(1, dtype=torch.complex128)}), "x")
    assert made["w"].dtype is torch.complex128


def test_ckpt_loads_with_weights_only_and_holds_its_own_tensors_only() -> None:
    data = saved({"w": nn.Parameter(torch.ones(2)), "b": torch.zeros(1 << 20)})
    made = torch.load(io.BytesIO(data), weights_only=True)
    assert type(made) is dict
    assert type(made["w"]) is Tensor
    assert made["b"].shape == (1 << 20,)


def headed(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(begin: int, end: int, shape: object = (1,), dtype: object = "U8") -> dict[str, object]:
    """Return the entry of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": b"",
    "short": b"\x01\x00",
    "length 2^63": (2**63).to_bytes(8, "little") + b"{}",
    "length 2^64-1": b"\xff" * 8 + b"{}",
    "length beyond the file": headed({}, length=100),
    "no JSON": headed(b"{]"),
    "a list": headed([]),
    "deep": headed(b"[" * 100_000),
    "a key twice": headed(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "overlap": headed({"a": entry(0, 2, [2]), "b": entry(1, 3, [2])}, b"abc"),
    "same bytes twice": headed({"a": entry(0, 1), "b": entry(0, 1)}, b"a"),
    "gap": headed({"a": entry(0, 1), "b": entry(2, 3)}, b"abc"),
    "trailing bytes": headed({"a": entry(0, 1)}, b"ab"),
    "cut": headed({"a": entry(0, 2, [2])}, b"a"),
    "shape overflows": headed({"a": entry(0, 0, [2**62, 4])}),
    "shape overflows beside 0": headed({"a": entry(0, 0, [2**62, 2**62, 0])}),
    "size beyond 64 bits": headed(b'{"a":{"dtype":"U8","shape":[99999999999999999999999],"data_offsets":[0,0]}}'),
    "another size": headed({"a": entry(0, 1, [2])}, b"a"),
    "negative": headed({"a": entry(0, 1, [-1, -1])}, b"a"),
    "backwards": headed({"a": entry(1, 0)}, b"a"),
    "a true offset": headed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"a"),
    "no offsets": headed({"a": {"dtype": "U8", "shape": [1], "data_offsets": []}}, b"a"),
    "shape is text": headed({"a": entry(0, 1, "1")}, b"a"),
    "dtype unknown": headed({"a": entry(0, 1, [1], "PICKLE")}, b"a"),
    "dtype a list": headed({"a": entry(0, 1, [1], [])}, b"a"),
    "more keys": headed({"a": {**entry(0, 1), "code": "x"}}, b"a"),
    "no entry": headed({"a": 3}),
    "notes no dict": headed({"__metadata__": []}),
    "notes no text": headed({"__metadata__": {"a": 1}}),
    "ties no dict": headed({"__metadata__": {"zae.tied": "[]"}}),
    "ties no JSON": headed({"__metadata__": {"zae.tied": "[" * 10_000}}),
    "tied to nothing": headed({"__metadata__": {"zae.tied": '{"a": "b"}'}}),
    "tied over another": headed({"__metadata__": {"zae.tied": '{"a": "a"}'}, "a": entry(0, 1)}, b"a"),
    "many axes": headed({"a": entry(0, 1, [1] * 100_000)}, b"a"),
    "spaces": headed(b"{" + b" " * 900_000 + b"}"),
    "spaces behind": headed(b"{}" + b" " * 900_000),
    "lines": headed(b"{" + b"\n\t\r " * 225_000 + b"}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_damage_within_seconds(name: str) -> None:
    tracemalloc.start()
    try:
        with within(5.0), pytest.raises(CheckpointDamaged, match=r"^model\.safetensors: "):
            read(HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_a_header_of_200_mb_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = Input.fill
    monkeypatch.setattr(Input, "fill", lambda self, buffer: asked.append(len(buffer)) or real(self, buffer))
    with open("model.safetensors", "wb") as file:
        file.write((200 << 20).to_bytes(8, "little"))
        file.truncate(300 << 20)
    with (
        open_input(Path("model.safetensors")) as source,
        pytest.raises(CheckpointDamaged, match="claims 209715200 bytes"),
    ):
        read_safetensors(source)
    assert asked == [8]


def test_tensors_outlive_their_file() -> None:
    """They are not views of a mapped file: that would end the process once somebody cuts it."""
    tensors, _ = read(written({"a": torch.arange(5000), "b": torch.tensor(3.5), "c": torch.ones(0, 3)}))
    os.truncate("model.safetensors", 0)
    assert torch.equal(tensors["a"], torch.arange(5000))
    assert tensors["b"].item() == 3.5
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 3


GOOD = written({"w": torch.ones(2, 2), "v": torch.ones(3, dtype=torch.int8)}, {"a": "b"})


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=4), st.integers(0, 3))
def test_any_change_is_read_or_is_damage(place: int, change: bytes, cut: int) -> None:
    data = (GOOD[:place] + change + GOOD[place + len(change) :])[: len(GOOD) - cut]
    try:
        found, _ = read(data)
    except CheckpointDamaged:
        return
    assert all(isinstance(each, torch.Tensor) for each in found.values())


class Payload:
    """An object whose unpickling runs code."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def payloads(marker: Path) -> dict[str, object]:
    """Return objects that leave a marker when they are unpickled."""
    code = f"open({str(marker)!r}, 'w').close()"
    nested = pickle.dumps(Payload(exec, code))
    return {
        "system": Payload(os.system, f"touch '{marker}'"),
        "eval": Payload(eval, code),
        "exec": Payload(exec, code),
        "getattr": Payload(getattr, Payload(__import__, "os"), "system"),
        "open": Payload(open, str(marker), "w"),
        "load_from_bytes": Payload(torch.storage._load_from_bytes, nested),
        "in a state": {"w": torch.ones(1), "x": Payload(exec, code)},
    }


def wrapped(value: object, how: str) -> bytes:
    """Store an object as one of the formats that torch.load knows."""
    if how == "raw":
        return pickle.dumps(value)
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=how == "zip")
    return stream.getvalue()


@pytest.mark.parametrize("how", ["zip", "legacy", "raw"])
@pytest.mark.parametrize("name", payloads(Path("x")))
def test_code_is_not_run(name: str, how: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = wrapped(payloads(marker)[name], how)
    with pytest.raises(CheckpointDamaged, match=r"^model\.ckpt: not loaded: contains code"):
        read_ckpt(data, "model.ckpt")
    with pytest.raises(CheckpointDamaged):
        read(data)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_programs_and_bombs_are_not_loaded() -> None:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), stream)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (10 << 20))
    for data in (stream.getvalue(), bomb.getvalue(), b"PK\x03\x04" + b"\0" * 100, saved({})[:-30]):
        with pytest.raises(CheckpointDamaged, match="not loaded: contains code"):
            read_ckpt(data, "model.ckpt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"weights": {"w": torch.ones(1)}, "epoch": 3}, r"contains a dict with the keys \['weights', 'epoch'\]"),
        (torch.ones(1), "contains a Tensor; expected a dict of tensors"),
    ],
)
def test_a_ckpt_of_something_else_says_what_it_holds(value: object, message: str) -> None:
    with pytest.raises(CheckpointDamaged, match=message):
        read_ckpt(wrapped(value, "zip"), "model.ckpt")
