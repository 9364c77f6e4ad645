"""Checkpoints that were cut, changed, mixed or made by somebody who means harm: refused, by name, and nothing runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import FILES, is_of, save
from test_tensor_files import HOSTILE, payloads, wrapped

from kit.faults import reseal
from kit.limits import within
from zae.checkpoint.folder import list_checkpoints, newest_valid, verify
from zae.checkpoint.manifest import read_manifest, seal
from zae.checkpoint.reader import load_checkpoint
from zae.errors import CheckpointDamaged, CheckpointMismatch, ConfigError

# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", FILES)
def test_every_flip_and_cut_is_found(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, 1)
    path = directory / name
    good = path.read_bytes()
    offsets = [index * (len(good) - 1) // 35 for index in range(36)]
    changed = [
        good[:offset] + bytes([good[offset] ^ 1 << index % 8]) + good[offset + 1 :]
        for index, offset in enumerate(offsets)
    ]
    for data in [*changed, b"", good[: len(good) // 2], good[:-1], good + b"\0"]:
        path.write_bytes(data)
        for act in (verify, load_checkpoint):
            with pytest.raises(CheckpointDamaged) as caught:
                act(directory)
            text = str(caught.value)
            assert text.startswith(f"{path}: ")
            assert text.endswith("delete this checkpoint and resume from an older one.") or name == "manifest.json"
            if name != "manifest.json" and len(data) == len(good):
                expected, found = (hashlib.sha256(each).hexdigest()[:12] for each in (good, data))
                assert f"expected sha256 {expected}, got {found}" in text
    path.write_bytes(good)
    assert is_of(directory, 1)


def test_no_bit_of_the_manifest_changes_unseen(tmp_path: Path) -> None:
    """Also those that leave it readable, and those that make it look newer: a damaged one is passed over."""
    directory = save(tmp_path, 1)
    path = directory / "manifest.json"
    good = path.read_bytes()
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 1 << index % 8]) + good[index + 1 :])
        with pytest.raises(CheckpointDamaged):
            read_manifest(directory)
    path.write_bytes(good.replace(b'"format": 1', b'"format": 4'))
    with pytest.raises(CheckpointDamaged, match=r"changed since it was written: .* \(or it was written by zae"):
        verify(directory)


def test_fault_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    """A manifest ties its files by their hashes."""
    first, second = save(tmp_path, 8), save(tmp_path, 16)
    for name in FILES[:3]:
        mixed = shutil.copytree(second, tmp_path / name)
        shutil.copy(first / name, mixed / name)
        with pytest.raises(CheckpointDamaged, match=r"of another checkpoint|cut short or overwritten"):
            load_checkpoint(mixed)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, 1)
    (directory / name).unlink()
    for act in (verify, load_checkpoint):
        with pytest.raises(CheckpointDamaged, match=f"{name}: is missing"):
            act(directory)


def test_allow_partial(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    (directory / "state.json").write_text("{}")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match=r"model.safetensors"):
        load_checkpoint(directory, allow_partial=["state.json"])
    with pytest.raises(CheckpointDamaged, match=r"state.json"):
        load_checkpoint(directory, allow_partial=["model.safetensors"])
    manifest, model, rest = load_checkpoint(directory, allow_partial=["state.json", "model.safetensors"])
    assert (manifest["step"], model, rest) == (1, {}, {})
    with pytest.raises(ConfigError, match="allow_partial names"):
        load_checkpoint(directory, allow_partial=["manifest.json"])


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) is None
    assert newest_valid(tmp_path / "no") is None
    for step in (8, 100_000_000, 16):
        save(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100000000", "step-00000016", "step-00000008"]
    (tmp_path / "step-100000000" / "state.json").write_bytes(b"{")
    shutil.rmtree(tmp_path / "step-00000016")
    (tmp_path / "step-00000016").mkdir()
    found = newest_valid(tmp_path)
    assert found is not None
    assert found[0].name == "step-00000008"
    assert [(path.name, "state.json: cut short" in reason) for path, reason in found[2]] == [
        ("step-100000000", True),
        ("step-00000016", False),
    ]
    (tmp_path / "step-00000008" / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged) as caught:
        newest_valid(tmp_path)
    assert "all of 3 checkpoints are damaged" in str(caught.value)
    assert all(f"  {path.name}: " in str(caught.value) for path in list_checkpoints(tmp_path))


def test_only_checkpoints_are_listed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for name in ("step-3", "step-0000000x", "step-00000004.bak", "best", ".deleting-step-00000005-" + "0" * 16):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000009").write_text("")
    (tmp_path / "step-00000010").symlink_to(tmp_path / "step-00000003")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003"]


# ---------------------------------------------------------------- hostile checkpoints


@pytest.mark.parametrize("how", ["zip", "legacy", "raw"])
@pytest.mark.parametrize("name", ["model.ckpt", *FILES])
def test_no_file_runs_code(tmp_path: Path, name: str, how: str) -> None:
    marker = tmp_path / "marker"
    directory = save(tmp_path, 1, model_format="ckpt" if name == "model.ckpt" else "safetensors")
    for payload in payloads(marker).values():
        (directory / name).write_bytes(wrapped(payload, how))
        if name != "manifest.json":
            reseal(directory)
        with pytest.raises(CheckpointDamaged) as caught:
            load_checkpoint(directory)
        assert str(directory / name) in str(caught.value)
        if name == "model.ckpt":
            assert "not loaded: contains code" in str(caught.value)
        assert not marker.exists()


BAD_NAMES = ["../x", "/etc/passwd", "a/../../x", "x\0y", "..\\x", "..", "", "extra.json", "\x1b[31mred"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_manifest_leads_nowhere_else(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, 1)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    entry = manifest["files"]["state.json"]
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(str(path)) or real(path, *rest, **more))
    for changed in ({**manifest["files"], name: entry}, {"state.json": entry, name: entry}):
        (directory / "manifest.json").write_bytes(seal({**manifest, "files": changed}))
        opened.clear()
        for act in (verify, load_checkpoint):
            with pytest.raises(CheckpointDamaged, match=r"lists the file|lacks") as caught:
                act(directory)
            assert "\x1b" not in str(caught.value)
        assert set(opened) <= {str(directory / "manifest.json")}


def test_keys_twice_links_pipes_and_directories(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    text = (directory / "manifest.json").read_bytes()
    (directory / "manifest.json").write_bytes(text.replace(b'"step": 1,', b'"step": 1, "step": 1,', 1))
    with pytest.raises(CheckpointDamaged, match="the key 'step' stands twice"):
        verify(directory)
    (directory / "manifest.json").write_bytes(text)
    target = tmp_path / "elsewhere"
    for name in FILES:
        path = directory / name
        path.rename(target)
        path.symlink_to(target)
        with pytest.raises(CheckpointDamaged, match=f"{name}: is a symbolic link"):
            load_checkpoint(directory)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointDamaged, match=f"{name}: is not a regular file"):
            load_checkpoint(directory)
        path.unlink()
        path.mkdir()
        with pytest.raises(CheckpointDamaged, match=f"{name}: "):
            load_checkpoint(directory)
        path.rmdir()
        target.rename(path)
    assert is_of(directory, 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_with_a_manifest_that_fits(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, 1)
    (directory / "model.safetensors").write_bytes(HOSTILE[name])
    reseal(directory)
    with within(5.0), pytest.raises(CheckpointDamaged, match=r"model\.safetensors: "):
        load_checkpoint(directory)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b'{"$tensor": "x"}', b"{" + b'"' * 99])
def test_hostile_state_with_a_manifest_that_fits(tmp_path: Path, data: bytes) -> None:
    directory = save(tmp_path, 1)
    (directory / "state.json").write_bytes(data)
    reseal(directory)
    with within(5.0), pytest.raises(CheckpointDamaged, match=r"state\.json: "):
        load_checkpoint(directory)


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_file_of_a_gigabyte_is_refused_unread(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, 1)
    os.truncate(directory / name, 1 << 30)
    if name == "state.json":
        manifest = json.loads((directory / "manifest.json").read_bytes())
        manifest["files"][name]["size"] = 1 << 30
        (directory / "manifest.json").write_bytes(seal(manifest))
    with within(5.0), pytest.raises(CheckpointDamaged, match="the limit is"):
        verify(directory)


def test_versions(tmp_path: Path) -> None:
    save(tmp_path, 1)
    directory = save(tmp_path, 2)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    (directory / "manifest.json").write_bytes(seal({**manifest, "format": 7, "zae": "9.1", "news": 1}))
    for act in (verify, load_checkpoint, lambda _: newest_valid(tmp_path)):
        with pytest.raises(
            CheckpointMismatch, match=r"written by zae '9.1', format 7; this version reads up to 3; upgrade"
        ):
            act(directory)
    for version in (0, -1, "1", None, True, 1.0):
        (directory / "manifest.json").write_bytes(seal({**manifest, "format": version}))
        with pytest.raises(CheckpointDamaged, match="names no format"):
            verify(directory)
    for data in (b"[]", b"{}", b"3", b"null"):
        (directory / "manifest.json").write_bytes(data)
        with pytest.raises(CheckpointDamaged, match="names no format"):
            verify(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "1"},
        {"tied": {"a": 1}},
        {"composition": [1]},
        {"model_format": "pickle"},
        {"model_format": ["ckpt"]},
        {"files": []},
        {"files": {}},
        {"info": {"$code": 1}},
        {"more": 1},
        {"zae": None},
    ],
    ids=str,
)
def test_every_field_is_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    directory = save(tmp_path, 1)
    reseal(directory, **change)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json: "):
        verify(directory)


def test_format_1_as_it_is_written_by_hand(tmp_path: Path) -> None:
    """The format of this version, without its code: later versions must keep reading this."""

    def tensor_file(name: str, note: dict[str, str]) -> bytes:
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        header = json.dumps({"__metadata__": note, name: entry}).encode()
        return len(header).to_bytes(8, "little") + header + b"\0\0\x80\x3f\0\0\0\x40"

    contents = {
        "model.safetensors": tensor_file("w", {"format": "pt", "head": "w", "zae.tied": '{"head": "w"}'}),
        "state.safetensors": tensor_file("optimizer.0", {"format": "pt"}),
        "state.json": b'{"optimizer":{"$dict":[[0,{"$tensor":"optimizer.0"}]]},'
        b'"betas":{"$tuple":[0.9,{"$float":"inf"}]}}',
    }
    files_part = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()
    }
    body = {
        "format": 1,
        "zae": "0.1.0",
        "run_id": "r",
        "step": 5,
        "epoch": 1,
        "composition": ["AMPAddon"],
        "world_size": 1,
        "model_format": "safetensors",
        "tied": {"head": "w"},
        "files": files_part,
        "info": {"best": {"$float": "nan"}},
    }
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    contents["manifest.json"] = json.dumps({**body, "sha256": digest}, indent=1).encode() + b"\n"
    directory = tmp_path / "step-00000005"
    directory.mkdir()
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    manifest, model, rest = load_checkpoint(directory)
    assert manifest["step"] == 5
    assert model["w"].tolist() == [1.0, 2.0]
    assert model["head"] is model["w"]
    assert rest["optimizer"][0].tolist() == [1.0, 2.0]
    assert rest["betas"] == (0.9, float("inf"))
