"""Bytes on their way: none is lost, each is hashed, the first error is kept, and memory stays bounded."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from zae.checkpoint import hashed_files
from zae.checkpoint.hashed_files import CHUNK, Output, open_input, read_whole
from zae.errors import CheckpointDamaged


def test_pieces_of_every_size_are_written_and_hashed_in_order() -> None:
    data = os.urandom(3 << 20)
    written: list[bytes] = []
    with closing(Output(lambda piece: written.append(bytes(piece)))) as output:
        for piece in (b"", data[:1], data[1:1000], data, data[:5], memoryview(data).cast("I"), data[:10], data * 4):
            output.write(piece)
        output.flush()
    whole = data[:1000] + data + data[:5] + data + data[:10] + data * 4
    assert b"".join(written) == whole
    assert (output.size, output.hexdigest()) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert max(map(len, written)) == CHUNK


def test_a_thousand_small_pieces_are_few_writes() -> None:
    written: list[int] = []
    with closing(Output(lambda piece: written.append(len(piece)))) as output:
        for _ in range(3000):
            output.write(b"x" * 1000)
        output.flush()
    assert len(written) == 3
    assert sum(written) == 3_000_000


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_the_first_error_is_kept_and_no_write_follows_it(size: int) -> None:
    calls: list[int] = []

    def fail(piece: memoryview) -> None:
        calls.append(len(piece))
        raise OSError(28, "full")

    output = Output(fail)

    def write_all() -> None:
        output.write(b"x" * size)
        output.flush()

    with closing(output):
        with pytest.raises(OSError, match="full") as first:
            write_all()
        with pytest.raises(OSError, match="full") as second:
            output.write(b"more")
    assert output.error is first.value is second.value
    assert len(calls) == 1
    for thread in threading.enumerate():
        if thread.name == "zae-sha256":  # It ends by itself, also that of a test before.
            thread.join(10)
            assert not thread.is_alive()


def test_it_works_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with closing(Output(lambda piece: None)) as output:
        output.write(b"x" * (3 << 20))
    assert output.hexdigest() == hashlib.sha256(b"x" * (3 << 20)).hexdigest()


def test_a_slow_hash_holds_the_writing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_files, "_MAX_WAITING", 2)
    real = hashlib.sha256()
    ahead: list[int] = []

    class Slow:
        def update(self, data: Any) -> None:
            time.sleep(0.002)
            real.update(data)

        def hexdigest(self) -> str:
            return real.hexdigest()

    output = Output(lambda piece: ahead.append(output._queue.qsize()))
    output._digest = Slow()  # type: ignore[assignment]
    with closing(output):
        for index in range(20):
            output.write(bytes([index]) * (2 << 20))
    assert max(ahead) == 2
    assert output.hexdigest() == hashlib.sha256(b"".join(bytes([i]) * (2 << 20) for i in range(20))).hexdigest()


def test_reading_compares_size_hash_and_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    good = hashlib.sha256(b"abc").hexdigest()
    assert read_whole(path, size=3, sha256=good, limit=3) == b"abc"
    with pytest.raises(CheckpointDamaged, match="expected 4 bytes, got 3"):
        read_whole(path, size=4)
    with pytest.raises(CheckpointDamaged, match="has 3 bytes; the limit is 2"):
        read_whole(path, limit=2)
    with pytest.raises(CheckpointDamaged, match="expected sha256 000000000000, got ba7816bf8f01"):
        read_whole(path, sha256="0" * 64)
    with open_input(path) as source, pytest.raises(CheckpointDamaged, match="ends before its 3 bytes"):
        source.fill(memoryview(bytearray(4)))
    with open_input(path) as source:
        path.write_bytes(b"abcd")
        with pytest.raises(CheckpointDamaged, match="changed since it was written"):
            source.finish(good)


def test_a_disk_that_cannot_read_is_damage(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(CheckpointDamaged, match="cannot be read: Input/output error"):
        with open_input(tmp_path / "f"):
            raise OSError(5, "Input/output error")
