"""Small files that are made to cost time or memory, and files that are not files: refused, or read, within a second."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import save

from kit.faults import reseal, warm
from kit.limits import within
from zae import Trainer
from zae.addons import JSONLLoggerAddon, LedgerAddon, StateManagerAddon
from zae.addons.state_manager.crash import crashes_in
from zae.checkpoint.ckpt_files import read_ckpt, write_ckpt
from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.folder import list_checkpoints, newest_valid
from zae.checkpoint.hashed_files import open_input
from zae.checkpoint.json_text import strict_json
from zae.checkpoint.locks import FolderLock
from zae.checkpoint.manifest import parse, seal
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.tensor_files import read_safetensors
from zae.checkpoint.weights import load_weights
from zae.diff import read_ledger
from zae.doctor.checkpoints import examine
from zae.errors import CheckpointDamaged, CheckpointError, ConfigError

SIZE = 400_000
P = 2**61 - 1  # what Python's hash of a number is the remainder of
MOST = 10.0  # Seconds of a slow processor; the promise is one for a megabyte, and what is quadratic takes minutes.


def repeated(item: Callable[[int], str], size: int = SIZE) -> str:
    """Return as many different items as there is room for."""
    made, length, number = [], 0, 1
    while length < size:
        made.append(item(number))
        length += len(made[-1]) + 1
        number += 1
    return ",".join(made)


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Return different pairs of whole numbers that have one hash: each step of a tuple's hash can be undone."""
    first, second, start, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1
    inverse, made, number = pow(second, -1, 2**64), [], 1
    while len(made) < count:
        state = (start + number * second) & mask
        state = ((state << 31 | state >> 33) & mask) * first & mask
        other = (0x123456789ABCDEF - state) * inverse & mask
        if other < P:
            made.append((number, other))
        number += 1
    assert len(set(map(hash, made))) == 1
    return made


PAIRS = colliding_pairs(8_000)
STATES = {
    "integers beyond 64 bits as keys": '{"$dict":[' + repeated(lambda i: f'[{{"$int":"{i * P:#x}"}},0]') + "]}",
    "integers beyond 64 bits in a set": '{"$set":[' + repeated(lambda i: f'{{"$int":"{i * P:#x}"}}') + "]}",
    "tuples as keys": '{"$dict":[' + ",".join(f'[{{"$tuple":[{a},{b}]}},0]' for a, b in PAIRS) + "]}",
    "tuples in a frozenset": '{"$frozenset":[' + ",".join(f'{{"$tuple":[{a},{b}]}}' for a, b in PAIRS) + "]}",
    "complex numbers in a set": '{"$set":['
    + repeated(lambda i: f'{{"$complex":[{2**50 - 1000003 * i}.0,{i}.0]}}')
    + "]}",
    "floats as keys": '{"$dict":[' + repeated(lambda i: f"[{2.0 ** (i % 1000) * (1 + i // 1000)!r},0]") + "]}",
    "axes of an array": '{"$array":[{"$tensor":"t"},"<f8",[' + repeated(lambda i: "9223372036854775807") + "]]}",
    "axes of a tensor": '{"$tensor":["t",null,[0],[' + repeated(lambda i: "9223372036854775807") + "]]}",
    "bytes that are none": "[" + repeated(lambda i: '{"$bytes":"=="}') + '"",{"$bytes":"a"}]',
    "an array again and again": "[" + repeated(lambda i: '{"$array":[{"$tensor":"t"},"<f4",[25000]]}') + "]",
    "lists of an array": "[" + repeated(lambda i: '{"$tuple":{"$array":[{"$tensor":"t"},"|u1",[100000]]}}') + "]",
    "strides again and again": "[" + repeated(lambda i: '{"$tensor":["t",null,[0],[64]]}') + "]",
    "a tensor again and again": "[" + repeated(lambda i: '{"$tensor":"t"}') + "]",
    "a module in place of a dtype": '{"$dtype":"_inductor"}',
    "nested lists": "[" + repeated(lambda i: "[" * 190 + "]" * 190) + "]",
    "empty lists": "[" + repeated(lambda i: "[]") + "]",
    "empty dicts": "[" + repeated(lambda i: "{}") + "]",
    "empty pairs": "[" + repeated(lambda i: '{"$dict":[]}') + "]",
    "a long number": "[0." + "1" * SIZE + "]",
    "a long integer": "[" + "1" * SIZE + "]",
    "a long hexadecimal number": '{"$int":"0x' + "f" * SIZE + '"}',
    "text in place of a number": '{"$complex":["' + "1" * SIZE + '"]}',
    "keys": "{" + repeated(lambda i: f'"{i:x}":0') + "}",
}


READ = {"a tensor again and again", "an array again and again",
        "nested lists", "empty lists", "empty dicts", "empty pairs", "a long number", "keys",
        "a long hexadecimal number", "text in place of a number"}  # fmt: skip


@pytest.mark.sample(count=8)
@pytest.mark.parametrize("name", STATES)
def test_a_small_state_takes_no_time(name: str) -> None:
    tensors = {"t": torch.zeros(100_000, dtype=torch.uint8)}
    is_read = name in READ
    with within(MOST), contextlib.nullcontext() if is_read else pytest.raises(CheckpointDamaged):
        decode(strict_json(STATES[name].encode(), "state.json"), tensors)


@pytest.mark.parametrize("name", ["nested lists", "empty lists", "empty dicts", "keys"])
def test_a_small_manifest_takes_no_time(name: str) -> None:
    info = json.dumps({"format": 1, "info": {"x": 0}}).replace("0", STATES[name]).encode()
    with within(MOST), pytest.raises(CheckpointDamaged, match="changed since it was written"):
        parse(info, "manifest.json")


def test_manifests_are_compared_by_their_text() -> None:
    content = {"format": 1, "info": {"x": [[]] * 20_000}}
    with within(MOST), pytest.raises(CheckpointDamaged, match="missing"):
        parse(seal(content), "manifest.json")
    for text in (b'{"sha256": "%s"}' % (b"0" * 64), seal(content)[:-1], seal(content).replace(b"1", b"2", 1)):
        with pytest.raises(CheckpointDamaged):
            parse(text, "manifest.json")


HEADERS = {
    "tensors": "{" + repeated(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}') + "}",
    "axes": "{" + repeated(lambda i: f'"{i}":{{"dtype":"U8","shape":[{"0," * 1000}0],"data_offsets":[0,0]}}') + "}",
    "notes": '{"__metadata__":{' + repeated(lambda i: f'"{i:x}":"a"') + "}}",
    "sizes": "{" + repeated(lambda i: f'"{i}":{{"dtype":"U8","shape":[{"9" * 18 + ","}0],"data_offsets":[0,0]}}') + "}",
    "spaces": "{" + " " * SIZE + "}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_small_header_takes_no_time(name: str) -> None:
    text = HEADERS[name].encode()
    Path("model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    found: dict[str, Any] = {}
    with within(MOST), contextlib.suppress(CheckpointDamaged), open_input(Path("model.safetensors")) as source:
        found, _ = read_safetensors(source)
    assert all(isinstance(each, torch.Tensor) for each in found.values())


def zipped(pickled: bytes, entries: int = 0) -> bytes:
    """Return a file as torch.save makes it, with any pickle in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for number in range(entries):
            archive.writestr(f"archive/data/{number}", b"")
    return stream.getvalue()


def dict_of(keys: list[Any]) -> bytes:
    """Return the pickle of a dict with these keys, which Python would take its time to make."""
    return b"\x80\x02}(" + b"".join(pickle.dumps(key, 2)[2:-1] + b"K\0" for key in keys) + b"u."


CALL = b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\nq\0ctorch\nfloat32\nq\1)K\1\x89(tq\2"
PICKLES = {
    "large integers as keys": dict_of([i * P for i in range(1, SIZE // 14)]),
    "tuples as keys": dict_of(PAIRS),
    "pairs": b"\x80\x02ccollections\nOrderedDict\n" + pickle.dumps(([(pair, 0) for pair in PAIRS],), 2)[2:-1] + b"R.",
    "marks": b"\x80\x02" + b"(" * SIZE + b".",
    "nothing": b"\x80\x02(" + b"N" * SIZE + b"t.",
    "dicts": b"\x80\x02(" + b"}" * SIZE + b"t.",
    "nested": b"\x80\x02)" + b"\x85" * SIZE + b".",
    "sets": b"\x80\x02cbuiltins\nset\n" + pickle.dumps((PAIRS,), 2)[2:-1] + b"R.",
    "calls": CALL + b"h\0h\2R0" * (SIZE // 6) + b"N.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_small_ckpt_takes_no_time(name: str) -> None:
    with within(MOST), pytest.raises(CheckpointDamaged, match="not loaded"):
        read_ckpt(zipped(PICKLES[name]), "model.ckpt")


def test_a_ckpt_of_many_entries_or_tensors_is_read() -> None:
    with within(MOST):
        assert read_ckpt(zipped(pickle.dumps({}, 2), 8000), "model.ckpt") == {}
    shared = torch.ones(100)
    for tensors in (
        {f"{number}": torch.ones(()) for number in range(2000)},
        {f"{number}": shared[number % 100 :] for number in range(5000)},
        {"": torch.ones(2, 0), "w": torch.nn.Parameter(torch.ones(2))},
    ):
        stream = io.BytesIO()
        torch.save(tensors, stream)
        with within(MOST):
            found = read_ckpt(stream.getvalue(), "model.ckpt")
        assert list(found) == list(tensors)
    stream = io.BytesIO()
    write_ckpt(stream.write, torch.nn.LSTM(3, 4).state_dict())
    assert len(read_ckpt(stream.getvalue(), "model.ckpt")) == 4


def test_what_is_written_is_read_whatever_the_keys() -> None:
    """The limits on keys are no limits for anybody who does not look for them."""
    drawn = random.Random(1)
    keys: list[Any] = [2.0**power for power in range(-1000, 1000)]
    keys += [drawn.getrandbits(200) for _ in range(3000)] + [-drawn.getrandbits(64) for _ in range(3000)]
    keys += [(i, -i, "x", (i % 7, None)) for i in range(3000)] + [True, None, "", "$x"]
    state = {
        "dict": dict.fromkeys(keys, 1),
        "set": {*keys},
        "lists": [[1, 2.5, None, "a"], [], [[]]],
        "b": [b"x", b"x"],
    }
    structure, tensors = encode(state)
    assert decode(strict_json(json.dumps(structure).encode(), "s"), tensors) == state


# ---------------------------------------------------------------- files that are not files


def unplain(path: Path) -> Iterator[None]:
    """Put what is not a plain file at a path, one kind after the other."""
    os.mkfifo(path)
    yield
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket must be short
        server.bind(path.name)
        os.chdir(here)
        yield
    path.unlink()
    path.mkdir()
    yield
    path.rmdir()
    path.symlink_to("/dev/zero")
    yield
    path.unlink()
    path.symlink_to(path.name)
    yield
    path.unlink()


class Task(Trainer):
    """A regression."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Import what the first optimizer of a process imports: that is not a part of what is measured."""
    warm()


def trained(*add_ons: Any, **options: Any) -> Trainer:
    """Train one epoch."""
    model = torch.nn.Linear(2, 1)
    made = Task.add_on(*add_ons)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options
    )
    made.run(1, [torch.ones(4, 2)] * 2)
    return made


def test_a_lock_that_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    for _ in unplain(tmp_path / ".lock"):
        with within(MOST):
            FolderLock(tmp_path).check()
            assert examine(tmp_path)["holder"] is None
    os.mkfifo(tmp_path / ".lock")
    with within(MOST):
        trained(StateManagerAddon, save_path=tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert not (tmp_path / ".lock").exists()
    for text in ("[" * 4000, "[]", '"x"', "1" * 4000, '{"pid":', "x" * 5000):
        (tmp_path / ".lock").write_text(text)
        FolderLock(tmp_path).check()


def test_a_checkpoint_of_no_files_holds_nobody_up(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    kept = tmp_path / "kept"
    for name in ("manifest.json", "state.json", "state.safetensors", "model.safetensors"):
        (directory / name).rename(kept)
        for _ in unplain(directory / name):
            with within(MOST):
                for act in (load_checkpoint, load_weights, newest_valid):
                    if act is not load_weights or name in ("manifest.json", "model.safetensors"):
                        with pytest.raises(CheckpointDamaged):
                            act(directory if act is not newest_valid else tmp_path)
                assert not examine(tmp_path)["healthy"]
        kept.rename(directory / name)
    reseal(directory)
    assert newest_valid(tmp_path) is not None


def test_names_of_ours_that_are_something_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "crash-00000007")
    os.mkfifo(tmp_path / "step-00000007")
    (tmp_path / ".crash-00000003-x").write_text("")
    assert crashes_in(tmp_path) == list_checkpoints(tmp_path) == []
    assert examine(tmp_path)["crashes"] == []
    with within(MOST):
        trained(StateManagerAddon, save_path=tmp_path)
    for path, act in {"model.safetensors": load_weights, "model.ckpt": load_weights, "l.jsonl": read_ledger}.items():
        for _ in unplain(tmp_path / path):
            with within(MOST), pytest.raises((CheckpointError, ConfigError)):
                act(tmp_path / path)


@pytest.mark.parametrize(("add_on", "option"), [(LedgerAddon, "ledger_path"), (JSONLLoggerAddon, "jsonl_path")])
def test_logs_that_are_no_files(tmp_path: Path, add_on: Any, option: str) -> None:
    path = tmp_path / "log.jsonl"
    os.mkfifo(path)
    with within(MOST), pytest.raises(ConfigError, match="pipe or a socket"):
        trained(add_on, **{option: path})
    with within(MOST):
        trained(add_on, **{option: os.devnull})


def test_a_hostile_ledger_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    line = '{"step": 1, "stages": {}}\n'
    steps = repeated(lambda i: f'{{"step": {i * P}, "stages": {{}}}}').replace("},{", "}\n{")
    for text in (steps, '{"step": ' + "[" * 100_000, '{"step": 1e999, "stages": {}}\n' * 3, '{"step": -1}\n' * 3):
        path.write_text(text + "\n" + line)
        with within(MOST), pytest.raises(ConfigError, match="is not a line of a ledger"):
            read_ledger(path)
