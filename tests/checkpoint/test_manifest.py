"""The manifest by itself; what it does for a checkpoint is in test_checkpoint."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from zae.checkpoint.manifest import MANIFEST_LIMIT, FileEntry, draft, parse, seal
from zae.errors import CheckpointDamaged, CheckpointError

ABOUT: dict[str, Any] = {"run_id": "r", "step": 3, "epoch": 1, "composition": ["A"], "world_size": 1}


def full(**about: Any) -> dict[str, Any]:
    """Return a manifest with its files."""
    manifest: dict[str, Any] = {**draft("ckpt", {"b": "a"}, ABOUT | about)}
    for name in ("model.ckpt", "state.safetensors", "state.json"):
        manifest["files"][name] = FileEntry(size=1, sha256="0" * 64)
    return manifest


def test_it_comes_back_with_any_text_and_any_plain_info() -> None:
    info = {"nan": float("inf"), 3: (1, [None]), "$tuple": 1, "ansi": "\x1b[31m\ud800", "big": 2**80}
    manifest = parse(seal(full(info=info, run_id="\x1b\U0001f600")), "manifest.json")
    assert manifest["info"] == info
    assert manifest["run_id"] == "\x1b\U0001f600"
    assert manifest["tied"] == {"b": "a"}


def test_what_it_says_is_shown_escaped() -> None:
    bad = full() | {"step": "\x1b[31m{0}%s"}
    with pytest.raises(CheckpointDamaged) as caught:
        parse(seal(bad), "manifest.json")
    assert "'\\x1b[31m{0}%s'" in str(caught.value)


def test_it_has_a_limit_when_it_is_written() -> None:
    with pytest.raises(CheckpointError, match="the limit is"):
        seal(full(info={"notes": "x" * MANIFEST_LIMIT}))


def test_another_order_or_spacing_is_a_change() -> None:
    text = seal(full())
    for changed in (text.replace(b"\n ", b"\n  ", 1), text + b"\n", b" " + text):
        with pytest.raises(CheckpointDamaged, match="changed since it was written"):
            parse(changed, "manifest.json")


def test_the_seal_is_the_hash_of_the_text_without_it() -> None:
    for content in ({}, {"step": 3}, {"sha256": "of another text", "info": {"a": "}\n}", "b": "%s"}}, dict(full())):
        body = {key: value for key, value in content.items() if key != "sha256"}
        digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
        assert seal(content) == json.dumps({**body, "sha256": digest}, indent=1).encode() + b"\n"
