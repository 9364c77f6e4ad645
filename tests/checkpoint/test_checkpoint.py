"""Checkpoints on the disk: whole or absent at every instant, and refused when they are not what was written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_tensor_files import Tied, wrapped
from torch import Tensor, nn

from kit.checkpoints import save_checkpoint
from kit.faults import RefusingDisk, installed
from zae.checkpoint import filesystem
from zae.checkpoint.filesystem import FileSystem, make_directory
from zae.checkpoint.folder import list_checkpoints, newest_valid, remove_checkpoint, sweep, verify
from zae.checkpoint.names import checkpoint_name, staging_name
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.tensor_files import parse_format
from zae.checkpoint.weights import load_weights, save_weights
from zae.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
)

FILES = ["model.safetensors", "state.safetensors", "state.json", "manifest.json"]


def model_state(step: int = 0) -> dict[str, Tensor]:
    """Return a small model's state with a tie in it."""
    weight = torch.arange(6.0).view(2, 3) + step
    return {"embed.weight": weight, "bias": torch.full((2,), float(step)).to(torch.bfloat16), "head.weight": weight}


def state(step: int = 0) -> dict[str, Any]:
    """Return the state beside it."""
    return {"optimizer": {"state": {0: {"exp_avg": torch.full((2,), float(step))}}, "betas": (0.9, 0.99)}, "step": step}


def save(parent: Path, step: int, *, name: str | None = None, **options: Any) -> Path:
    """Write the checkpoint of a step."""
    about = {"run_id": "run-1", "step": step, "epoch": 1, "composition": ["AMPAddon"], "world_size": 2}
    about["info"] = {"loss": float("nan"), "pair": (1, 2)}
    directory = parent / (name or checkpoint_name(step))
    return save_checkpoint(directory, model_state(step), state(step), manifest_info=about, **options)


def is_of(directory: Path, step: int) -> bool:
    """Say whether a checkpoint is whole and holds, bit for bit, what was saved at the step."""
    manifest, model, rest = load_checkpoint(directory)
    expected = model_state(step)
    return (
        manifest["step"] == rest["step"] == step
        and list(model) == list(expected)
        and all(torch.equal(model[key], expected[key]) for key in expected)
        and torch.equal(rest["optimizer"]["state"][0]["exp_avg"], torch.full((2,), float(step)))
        and rest["optimizer"]["betas"] == (0.9, 0.99)
    )


class Killed(BaseException):
    """The process has ended."""


class Watched(FileSystem):
    """Records every operation, and lets a test do something before one."""

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], None] = lambda number, name, given: None) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self._before = before

    def __getattribute__(self, name: str) -> Any:
        method = object.__getattribute__(self, name)
        if name.startswith("_") or name == "log":
            return method

        def operation(*given: Any) -> Any:
            self.log.append((name, given))
            self._before(len(self.log), name, given)
            return method(*given)

        return operation


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the real disk a thousand times; that it is asked to is seen in the log of operations."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    """Put a watched file system in the place of the real one."""

    def put(before: Callable[[int, str, tuple[Any, ...]], None] = lambda number, name, given: None) -> Watched:
        watched = Watched(before)
        monkeypatch.setattr(filesystem, "disk", watched)
        return watched

    yield put
    for handle in range(3, 200):  # what a killed process would have closed
        try:
            target = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            continue
        if ".staging-" in target:
            os.close(handle)


def killed_at(number: int, torn: bool) -> Callable[[int, str, tuple[Any, ...]], None]:
    """Kill before the operation of a number, after half of it if it is a write; nothing happens from then on."""

    def before(count: int, name: str, given: tuple[Any, ...]) -> None:
        if torn and count == number and name == "write":
            FileSystem().write(given[0], given[1][: len(given[1]) // 2])
        if count >= number:
            raise Killed

    return before


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("model_format", ["safetensors", "ckpt"])
def test_a_checkpoint_comes_back(tmp_path: Path, model_format: str) -> None:
    directory = save(tmp_path, 12, model_format=model_format)
    assert is_of(directory, 12)
    manifest, model, _ = load_checkpoint(directory)
    assert (
        model["head.weight"] is model["embed.weight"]
        or model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
    )
    assert manifest == verify(directory)
    assert manifest["tied"] == {"head.weight": "embed.weight"}
    assert manifest["model_format"] == model_format
    assert manifest["composition"] == ["AMPAddon"]
    assert manifest["info"]["pair"] == (1, 2)
    assert sorted(os.listdir(tmp_path)) == [directory.name]
    assert sorted(manifest["files"]) == sorted(set(os.listdir(directory)) - {"manifest.json"})


def test_the_files_are_read_by_everybodys_tools_without_pickle(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    assert safetensors.torch.load_file(first / "model.safetensors").keys() == {"embed.weight", "bias"}
    assert safetensors.torch.load_file(first / "state.safetensors").keys() == {"optimizer.state.0.exp_avg"}
    assert json.loads((first / "state.json").read_bytes())["step"] == 1
    second = save(tmp_path, 2, model_format="ckpt")
    assert torch.load(second / "model.ckpt", weights_only=True).keys() == model_state().keys()


def test_a_tied_model_stays_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    about = {"run_id": "r", "step": 0, "epoch": 0, "composition": [], "world_size": 1}
    path = save_checkpoint(tmp_path / "best", model.state_dict(), {}, manifest_info=about)
    other.load_state_dict(load_checkpoint(path)[1])
    assert other.head.weight.data_ptr() == other.embed.weight.data_ptr()
    assert torch.equal(other.head.weight, model.head.weight)
    third = Tied()
    safetensors.torch.load_model(third, path / "model.safetensors")
    assert torch.equal(third.head.weight, model.head.weight)


def test_formats(tmp_path: Path) -> None:
    assert [parse_format(name) for name in (".ckpt", ".safetensor", "safetensors")] == ["ckpt"] + ["safetensors"] * 2
    with pytest.raises(ConfigError, match="unknown model format 'zip'; write 'safetensors' or 'ckpt'"):
        save(tmp_path, 1, model_format="zip")
    assert os.listdir(tmp_path) == []


def test_a_tensor_in_the_manifest_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    info = {"t": torch.ones(1)}
    about = {"run_id": "r", "step": 0, "epoch": 0, "composition": [], "world_size": 1, "info": info}
    with pytest.raises(ConfigError, match="holds a tensor at 't'"):
        save_checkpoint(tmp_path / "x", {}, {}, manifest_info=about)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    about = {"run_id": "r", "step": 0, "epoch": 0, "composition": [], "world_size": 1}
    with pytest.raises(CheckpointError, match=r"hooks\[0\] is a builtin_function_or_method"):
        save_checkpoint(tmp_path / "x", {}, {"hooks": [print]}, manifest_info=about)
    with pytest.raises(CheckpointError, match=r"'w' is of torch.complex128"):
        save_checkpoint(tmp_path / "x", {"w": torch.ones(1).to(torch.complex128)}, {}, manifest_info=about)
    assert os.listdir(tmp_path) == []


def test_many_small_and_some_large_tensors(tmp_path: Path) -> None:
    model = {f"w{index}": torch.full((index % 50,), index) for index in range(3000)}
    model |= {"large": torch.arange(5 << 20, dtype=torch.int32), "after": torch.ones(2)}
    about = {"run_id": "r", "step": 0, "epoch": 0, "composition": [], "world_size": 1}
    for model_format in ("safetensors", "ckpt"):
        path = save_checkpoint(tmp_path / "x", model, {}, model_format=model_format, manifest_info=about)
        made = load_checkpoint(path)[1]
        assert all(torch.equal(made[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("how", ["as ever", "refused", "not on this system"])
def test_the_disk_is_told_of_large_pieces_while_the_next_are_prepared(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hint that shortens the wait at the end: what is written, and that it is waited for, does not hang on it."""
    told: list[tuple[int, int]] = []
    advise = getattr(os, "posix_fadvise", None)

    def note(handle: int, start: int, size: int, advice: int) -> None:
        told.append((start, size))
        if how == "refused":
            raise OSError(errno.EINVAL, "Invalid argument")
        if advise is not None:
            advise(handle, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", note, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    if how == "not on this system":
        monkeypatch.delattr(os, "posix_fadvise")
    small, large = b"s" * 1000, os.urandom((1 << 20) + 5)
    handle = filesystem.disk.create(tmp_path / "file")
    for piece in (small, large, small, large):
        filesystem.disk.write(handle, memoryview(piece))
    filesystem.disk.fsync(handle)
    filesystem.disk.close(handle)
    assert (tmp_path / "file").read_bytes() == small + large + small + large
    expected = [(1000, len(large)), (2000 + len(large), len(large))]
    assert told == ([] if how == "not on this system" else expected)


@pytest.mark.parametrize("model_format", ["safetensors", "ckpt"])
def test_another_default_device_changes_nothing(tmp_path: Path, model_format: str) -> None:
    with torch.device("meta"):
        directory = save_checkpoint(
            tmp_path / checkpoint_name(1),
            {"w": torch.ones(2, device="cpu"), "e": torch.ones(0, device="cpu")},
            {"t": torch.ones((), dtype=torch.complex128, device="cpu"), "b": b"", "c": b"x"},
            model_format=model_format,
            manifest_info={"run_id": "r", "step": 1, "epoch": 0, "composition": [], "world_size": 1},
        )
        _, model, rest = load_checkpoint(directory)
    assert {tensor.device.type for tensor in (*model.values(), rest["t"])} == {"cpu"}
    assert (rest["t"].item(), rest["b"], rest["c"]) == (1 + 0j, b"", b"x")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_write(tmp_path: Path, umask: int, watch: Callable[..., Watched]) -> None:
    modes: set[int] = set()

    def look(number: int, name: str, given: tuple[Any, ...]) -> None:
        for place in tmp_path.rglob("*"):
            modes.add(stat.S_IMODE(place.lstat().st_mode))

    before = os.umask(umask)
    try:
        watch(look)
        save(tmp_path / "runs", 1)
        save_weights(tmp_path / "runs" / "w.ckpt", model_state())
        look(0, "", ())
    finally:
        os.umask(before)
    assert modes == {0o755 & ~umask, 0o644 & ~umask}


def test_staging_names_are_unpredictable_and_exclusive(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    watched = watch()
    save(tmp_path, 1)
    save(tmp_path, 1)
    made = [given[0].name for name, given in watched.log if name == "mkdir"]
    assert len(set(made)) == 2
    assert all(len(name.rpartition("-")[2]) == 16 for name in made)
    (tmp_path / "there").write_text("")
    with pytest.raises(FileExistsError):
        FileSystem().create(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        FileSystem().create(tmp_path / "link")


def test_the_order_of_operations(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    watched = watch()
    save(tmp_path, 1)
    names = [name for name, _ in watched.log]
    one_file = ["create", "write", "fsync", "close"]
    assert names == ["mkdir", *one_file * 4, "fsync_directory", "rename", "fsync_directory"]
    source, target = watched.log[-2][1]
    assert source.parent == target.parent == tmp_path
    assert watched.log[-1][1] == (tmp_path,)


# ---------------------------------------------------------------- killed, or refused by the disk


def operations(parent: Path, act: Callable[[Path], object], watch: Callable[..., Watched]) -> int:
    """Count the operations of an action in a directory that exists."""
    parent.mkdir(exist_ok=True)
    watched = watch()
    act(parent)
    return len(watched.log)


@pytest.mark.parametrize("torn", [False, True], ids=["killed", "torn"])
@pytest.mark.parametrize("model_format", ["safetensors", "ckpt"])
def test_killed_at_every_operation_of_a_save(
    tmp_path: Path, watch: Callable[..., Watched], torn: bool, model_format: str
) -> None:
    def act(parent: Path) -> None:
        save(parent, 2, model_format=model_format)

    for number in range(1, operations(tmp_path / "count", act, watch) + 1):
        parent = tmp_path / str(number)
        watch()
        save(parent, 1)
        watch(killed_at(number, torn))
        with pytest.raises(Killed):
            act(parent)
        watch()
        found = newest_valid(parent)
        assert found is not None
        assert is_of(found[0], found[1]["step"])
        assert not found[2]
        save(parent, 3)
        assert {name for name in os.listdir(parent) if name.startswith(".")} == set()


@pytest.mark.parametrize("name", [None, "last"])
def test_killed_at_every_operation_of_replacing(
    tmp_path: Path, watch: Callable[..., Watched], name: str | None
) -> None:
    """The only checkpoint is replaced: it is there, old or new, at every operation."""

    def act(parent: Path) -> None:
        save(parent, 7, name=name or checkpoint_name(1))

    watch()
    save(tmp_path / "count", 1, name=name)
    for number in range(1, operations(tmp_path / "count", act, watch) + 1):
        parent = tmp_path / str(number)
        watch()
        save(parent, 1, name=name)
        watch(killed_at(number, torn=True))
        with pytest.raises(Killed):
            act(parent)
        watch()
        directory = parent / (name or checkpoint_name(1))
        assert is_of(directory, load_checkpoint(directory)[0]["step"])
        if name is None:
            found = newest_valid(parent)
            assert found is not None
            assert is_of(found[0], found[1]["step"])
        act(parent)
        assert os.listdir(parent) == [directory.name]
        assert is_of(directory, 7)


def test_killed_at_every_operation_of_a_removal(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    def act(parent: Path) -> None:
        remove_checkpoint(parent / checkpoint_name(2))

    for number in range(1, 20):
        parent = tmp_path / str(number)
        watch()
        save(parent, 1)
        save(parent, 2)
        watched = watch(killed_at(number, torn=False))
        try:
            act(parent)
        except Killed:
            pass
        else:
            assert len(watched.log) == number - 1 > 5
            break
        watch()
        assert [is_of(path, verify(path)["step"]) for path in list_checkpoints(parent)] in ([True], [True, True])
        sweep(parent)
        assert all(not name.startswith(".") for name in os.listdir(parent))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("model_format", ["safetensors", "ckpt"])
@pytest.mark.parametrize("once", [False, True], ids=["from then on", "once"])
def test_a_full_or_broken_disk(
    tmp_path: Path, watch: Callable[..., Watched], code: int, model_format: str, once: bool
) -> None:
    def act(parent: Path) -> None:
        save(parent, 2, model_format=model_format)

    total = operations(tmp_path / "count", act, watch)
    for number in range(1, total + 1):
        parent = tmp_path / str(number)
        watch()
        save(parent, 1)

        def refuse(count: int, name: str, given: tuple[Any, ...], number: int = number) -> None:
            if count == number or (count > number and not once):
                raise OSError(code, os.strerror(code), str(given[0]))

        watch(refuse)
        with pytest.raises(CheckpointError) as caught:
            act(parent)
        text = str(caught.value)
        assert f"{parent / checkpoint_name(2)} was not saved: {os.strerror(code)}" in text
        is_full = code == errno.ENOSPC
        for part in (" bytes are needed and ", " are free there", "Free some space, or give another path"):
            assert (part in text) == is_full, "no more space helps against a broken disk"
        assert is_full or "; give another path" in text
        assert (caught.value.errno, caught.value.__cause__) == (code, None)
        watch()
        assert is_of(parent / checkpoint_name(1), 1)
        if once:
            assert not [name for name in os.listdir(parent) if name.startswith(".staging")]
        save(parent, 3)
        assert not [name for name in os.listdir(parent) if name.startswith(".")]


def test_replacing_puts_the_old_one_back(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    directory = save(tmp_path, 1, name="last")

    def refuse(number: int, name: str, given: tuple[Any, ...]) -> None:
        if name == "rename" and given[0].name.startswith(".staging"):
            raise OSError(errno.EIO, "broken")

    watch(refuse)
    with pytest.raises(CheckpointError, match="broken"):
        save(tmp_path, 2, name="last")
    assert os.listdir(tmp_path) == ["last"]
    assert is_of(directory, 1)


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    def interrupt(number: int, name: str, given: tuple[Any, ...]) -> None:
        if name == "fsync":
            raise KeyboardInterrupt

    watch(interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="is a file, not a directory"):
        make_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="is a file, not a directory"):
        list_checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointNotFound):
        verify(tmp_path / "file" / "step-00000001")


# ---------------------------------------------------------------- what is left behind, and what is not ours


def test_stray_staging_directories_go_with_the_next_save(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    mine = staging_name("step-00000001")
    of_dead = mine.replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-")
    of_living = mine.replace(f"-{os.getpid()}-", f"-{os.getppid()}-")
    host = mine.split("-")[3]
    elsewhere = of_dead.replace(host, "0" * 8)
    old = of_living.replace(host, "1" * 8)
    for name in (mine, of_dead, of_living, elsewhere, old, ".staging-notes", ".deleting-x-" + "a" * 16):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    os.utime(tmp_path / old, (0, 0))
    (tmp_path / staging_name("w.ckpt")).write_text("half")
    save(tmp_path, 2)
    assert set(os.listdir(tmp_path)) == {of_living, elsewhere, ".staging-notes", checkpoint_name(2)}


def test_a_save_in_another_thread_is_not_swept(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    half, go_on = threading.Event(), threading.Event()

    def wait(number: int, name: str, given: tuple[Any, ...]) -> None:
        if name == "fsync" and threading.current_thread() is slow:
            half.set()
            go_on.wait(120)

    slow = threading.Thread(target=save, args=(tmp_path, 1))
    watch(wait)
    slow.start()
    half.wait(120)
    save(tmp_path, 2)
    go_on.set()
    slow.join()
    assert [is_of(path, step) for path, step in zip(list_checkpoints(tmp_path), (2, 1))] == [True, True]


def test_what_was_replaced_goes_only_once_the_new_one_is_read_again(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    aside = tmp_path / (".replaced-step-00000001-" + "a" * 16)
    shutil.copytree(directory, aside)
    (directory / "state.json").write_text("{}")
    assert sweep(tmp_path) == []
    found = newest_valid(tmp_path)
    assert found is not None
    assert (found[0], [path for path, _ in found[2]]) == (aside, [directory])
    save(tmp_path, 1)
    assert os.listdir(tmp_path) == [directory.name]


def test_a_replaced_checkpoint_stands_in_and_can_be_removed(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    aside = directory.rename(tmp_path / (".replaced-step-00000001-" + "a" * 16))
    assert is_of(directory, 1)
    assert list_checkpoints(tmp_path) == [aside]
    remove_checkpoint(aside)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        remove_checkpoint(directory)


def test_a_wrong_path_costs_nobodys_files(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("years")
    for act in (lambda: save(tmp_path, 1, name="thesis"), lambda: remove_checkpoint(tmp_path / "thesis")):
        with pytest.raises(CheckpointError, match=r"contains 'text.tex', which is not part of a checkpoint"):
            act()
    assert (tmp_path / "thesis" / "text.tex").read_text() == "years"
    directory = save(tmp_path, 1)
    (directory / "plots").symlink_to(tmp_path / "thesis")
    remove_checkpoint(directory)
    assert os.listdir(directory) == ["plots"]
    assert os.listdir(tmp_path / "thesis") == ["text.tex"]


def test_remove_reports_what_it_could_not(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    directory = save(tmp_path, 1)

    def refuse(number: int, name: str, given: tuple[Any, ...]) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(given[0]))

    watch(refuse)
    with pytest.raises(CheckpointError, match="was not removed: Operation not permitted"):
        remove_checkpoint(directory)


# ---------------------------------------------------------------- single files of weights


@pytest.mark.parametrize("suffix", [".safetensors", ".safetensor", ".ckpt", ".pt", ".pth", ".PT"])
def test_weights_in_one_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "made" / f"model{suffix}"
    assert save_weights(path, model_state(1), {"a": "b"}) == path
    save_weights(path, model_state(2))
    made = load_weights(path)
    assert all(torch.equal(made[name], tensor) for name, tensor in model_state(2).items())
    assert made["head.weight"].data_ptr() == made["embed.weight"].data_ptr()
    assert os.listdir(path.parent) == [path.name]
    (tmp_path / f"link{suffix}").symlink_to(path)
    assert load_weights(tmp_path / f"link{suffix}").keys() == made.keys()


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    for model_format in ("safetensors", "ckpt"):
        directory = save(tmp_path, 1, model_format=model_format)
        (directory / "state.json").unlink()
        assert torch.equal(load_weights(directory)["embed.weight"], model_state(1)["embed.weight"])


def test_weights_that_are_not_there_or_not_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no file"):
        load_weights(tmp_path / "x.safetensors")
    for act in (lambda path: load_weights(path), lambda path: save_weights(path, {})):
        with pytest.raises(ConfigError, match=r"unknown suffix '\.h5' .* write \.safetensors, .* or \.pth"):
            act(tmp_path / "x.h5")
    (tmp_path / "x.pt").write_bytes(wrapped(nn.Linear(2, 2), "zip"))
    with pytest.raises(CheckpointDamaged, match=r"x\.pt: not loaded: contains code"):
        load_weights(tmp_path / "x.pt")
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"x\.safetensors: not a whole safetensors file"):
        load_weights(tmp_path / "x.safetensors")


def test_weights_are_replaced_at_once(tmp_path: Path, watch: Callable[..., Watched]) -> None:
    path = tmp_path / "model.ckpt"
    total = operations(tmp_path, lambda _: save_weights(path, model_state(1)), watch)
    for number in range(1, total + 1):
        watch(killed_at(number, torn=True))
        with pytest.raises(Killed):
            save_weights(path, model_state(2))
        watch()
        assert load_weights(path)["bias"].tolist() in ([1.0, 1.0], [2.0, 2.0])
        save_weights(path, model_state(1))
        assert os.listdir(tmp_path) == [path.name]


# ---------------------------------------------------------------- what a user puts into the folder of a checkpoint


def put_in(directory: Path, text: str = "mine") -> None:
    """Do what users do: a note, a folder with plots, and a link."""
    (directory / "notes.txt").write_text(text)
    (directory / "plots").mkdir()
    (directory / "plots" / "state.json").write_text(text)
    (directory / "link").symlink_to("plots")


def are_kept(directory: Path, text: str = "mine") -> bool:
    """Say whether all of that is there."""
    kept = (directory / "notes.txt", directory / "plots" / "state.json", directory / "link" / "state.json")
    return all(path.read_text() == text for path in kept)


def test_files_of_a_user_outlive_the_checkpoint(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    put_in(directory)
    assert is_of(directory, 1)
    remove_checkpoint(directory)
    assert are_kept(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["link", "notes.txt", "plots"]
    assert list_checkpoints(tmp_path) == []
    assert newest_valid(tmp_path) is None
    save(tmp_path, 1)  # a checkpoint of that step, again
    assert is_of(directory, 1)
    assert are_kept(directory)
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_files_of_a_user_outlive_a_kill_at_any_operation(tmp_path: Path) -> None:
    for act in (remove_checkpoint, lambda directory: save(directory.parent, 2)):
        for at in range(40):
            folder = tmp_path / f"{act.__name__}-{at}"
            folder.mkdir()
            directory = save(folder, 2)
            put_in(directory)
            with installed(RefusingDisk(at, errno.EIO)) as disk, contextlib.suppress(CheckpointError, OSError):
                act(directory)
            sweep(folder)
            found = [path.parent for path in folder.rglob("notes.txt")]
            assert len(found) == 1
            assert are_kept(found[0])
            assert found[0] == directory or not directory.exists() or (directory / "manifest.json").exists()
            if disk.now < at:
                break
        assert at < 39
        assert found == [directory]


def test_what_cannot_be_given_back_stays_aside(tmp_path: Path) -> None:
    directory = save(tmp_path, 2)
    aside = directory.with_name(".replaced-step-00000002-0123456789abcdef")
    aside.mkdir()
    for place, text in ((aside, "old"), (directory, "new")):
        put_in(place, text)
    (aside / "state.json").write_text("{}")
    (aside / "more.txt").write_text("more")
    assert sweep(tmp_path) == []
    assert are_kept(aside, "old")
    assert are_kept(directory, "new")
    assert (directory / "more.txt").read_text() == "more"
    assert list_checkpoints(tmp_path) == [directory]
    assert is_of(directory, 2)
