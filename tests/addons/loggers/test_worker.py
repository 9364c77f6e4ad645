"""A sink that raises or blocks costs neither records nor time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kit.faults import wait_for
from kit.loggers import ListSink, forked, lines, warned
from zae import ConfigError, LoggerError, ZaeError
from zae.addons.loggers.base import RunInfo
from zae.addons.loggers.worker import SinkWorker

FOLDER = Path("zae-offline")
FILE = FOLDER / "list-r1.jsonl"


class Blocking(ListSink):
    """Block in one method, until it is released."""

    def __init__(self, method, at=0):
        super().__init__()
        self.method, self.at, self.count = method, at, 0
        self.reached, self.free = threading.Event(), threading.Event()

    def wait(self, method):
        if method == self.method:
            self.count += 1
            if self.count > self.at:
                self.reached.set()
                self.free.wait(600)

    def open(self, info):
        self.wait("open")
        super().open(info)

    def write(self, metrics, step):
        self.wait("write")
        super().write(metrics, step)

    def flush(self):
        self.wait("flush")

    def close(self, failed):
        self.wait("close")
        super().close(failed)


class Raising(ListSink):
    """Raise in one method."""

    def __init__(self, method, error, at=0):
        super().__init__()
        self.count = 0

        def fail(*args):
            self.count += 1
            if self.count > at:
                raise error
            getattr(ListSink, method)(self, *args)

        setattr(self, method, fail)


def guarded(sink, timeout=120.0, **options):
    """A worker that has begun."""
    worker = SinkWorker(sink, RunInfo("r1", timeout=timeout), FOLDER, **options)
    worker.start()
    return worker


def hurry(worker, method):
    """Give the call that is to block, and it alone, a time limit that is soon over."""
    if getattr(worker.sink, "method", "") == method:
        if method == "write":
            assert worker.sink.reached.wait(120)
        elif method != "open":
            worker.wait()
        worker.info = replace(worker.info, timeout=0.3)


def drive(worker, count=10, waits=1):
    """Open, write, wait so often for what was written, and close; return the seconds that took."""
    begin = time.monotonic()
    hurry(worker, "open")
    worker.wait()
    for step in range(1, count + 1):
        worker.write({"x": step / 2}, step)
    hurry(worker, "write")
    hurry(worker, "flush")
    for _ in range(waits):
        worker.wait(flush=True)
    hurry(worker, "close")
    worker.close(False)
    return time.monotonic() - begin


def test_calls_arrive_in_order():
    sink = ListSink()
    drive(guarded(sink), 3)
    assert [call[0] for call in sink.calls] == ["open", "write", "write", "write", "flush", "close"]
    assert not FOLDER.exists()
    assert not [t for t in threading.enumerate() if t.name == "zae-list" and (t.join(120) or t.is_alive())]


@pytest.mark.parametrize("at", [0, 6, 9])
def test_fault_a_write_that_raises(caplog, at):
    """One warning with reason and remedy, every record kept, and their number told once, at the end."""
    sink = Raising("write", ValueError("bad\n  \x1b[31mnews\x1b[0m"), at)
    drive(guarded(sink))
    failed, told = warned(caplog)
    assert "the logger list failed: ValueError: bad news" in failed
    assert str(FILE) in failed
    assert "nothing can be done" in failed
    assert told == f"{10 - at} records of list were kept in {FILE}"
    assert [row["step"] for row in lines(FILE)] == list(range(at + 1, 11))
    assert [step for _, step in sink.rows] == list(range(1, at + 1))
    assert sink.calls[-1] == ("close", True)


@pytest.mark.parametrize(
    ("method", "error"),
    [("open", OSError("no route")), ("open", SystemExit(3)), ("load", ImportError("no wheel"))],
)
def test_fault_a_sink_that_cannot_be_opened(caplog, method, error):
    sink = Raising(method, error)
    drive(guarded(sink))
    assert len(warned(caplog)) == 2
    assert str(error) in warned(caplog)[0]
    assert [row["step"] for row in lines(FILE)] == list(range(1, 11))


@pytest.mark.parametrize(
    ("method", "at", "kept"), [("open", 0, 10), ("write", 0, 10), ("write", 6, 4), ("flush", 0, 0)]
)
def test_fault_a_sink_that_blocks(caplog, method, at, kept):
    """It costs its time limit once, not at every call."""
    sink = Blocking(method, at)
    took = drive(guarded(sink), waits=100)
    assert 0.25 < took < 15
    assert f"its {method}() has not returned within 0.3 s" in warned(caplog)[0]
    assert len(warned(caplog)) == 1 + bool(kept)
    assert [row["step"] for row in (lines(FILE) if kept else [])] == list(range(11 - kept, 11))
    sink.free.set()


def test_fault_a_close_that_blocks(caplog):
    sink = Blocking("close")
    assert drive(guarded(sink)) < 100
    assert "its close() has not returned" in warned(caplog)[0]
    assert len(warned(caplog)) == 1
    assert len(sink.rows) == 10
    sink.free.set()


def test_a_slow_sink_is_no_failed_one(caplog):
    """Training does not wait while a record is written, whose limit begins when somebody waits for it."""
    sink = Blocking("write")
    worker = guarded(sink)
    worker.wait()
    for step in range(20):
        worker.write({}, step)
    assert sink.rows == []
    sink.free.set()
    worker.close(False)
    assert len(sink.rows) == 20
    assert not warned(caplog)


def test_what_a_late_client_opens_is_closed_again():
    sink = Blocking("open")
    worker = guarded(sink, timeout=0.3)
    worker.wait()
    worker.write({"x": 1}, 1)
    sink.free.set()
    wait_for(lambda: not worker._blocked)
    assert [call[0] for call in sink.calls] == ["open"]  # closing may draw random numbers: not while training runs
    worker.info = replace(worker.info, timeout=120.0)
    worker.close(False)
    assert [call[0] for call in sink.calls] == ["open", "close"]
    assert [row["step"] for row in lines(FILE)] == [1]


@pytest.mark.parametrize("method", ["open", "write"])
def test_fault_what_comes_back_after_the_end_is_left_as_it_is(method):
    """Closing may draw random numbers, and the next run may be training by then."""
    sink = Blocking(method)
    worker = guarded(sink)
    drive(worker, 2)
    sink.free.set()
    worker._thread.join(120)
    assert not worker._thread.is_alive()
    assert [call[0] for call in sink.calls] == ["open", "write"][: 1 + (method == "write")]


@pytest.mark.parametrize("make", [lambda: Raising("open", OSError("no route")), lambda: Blocking("open")])
def test_fault_required_raises_instead(caplog, make):
    sink = make()
    worker = guarded(sink, required=True, timeout=0.3 if isinstance(sink, Blocking) else 120.0)
    with pytest.raises(LoggerError, match="logger_required=False") as caught:
        worker.wait()
    assert isinstance(caught.value, ZaeError)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None  # the client's own error, with what it was given, is not shown
    worker.write({"x": 1}, 1)
    worker.close(True)
    assert not warned(caplog)
    assert not FOLDER.exists()
    getattr(sink, "free", threading.Event()).set()


def test_fault_required_raises_at_the_record(caplog):
    worker = guarded(Raising("write", ValueError("bad"), at=6), required=True)
    worker.wait()
    for step in range(1, 7):
        worker.write({"x": 1}, step)
    with pytest.raises(LoggerError, match="list failed: ValueError: bad"):
        worker.write({"x": 1}, 7)
    worker.close(True)


@pytest.mark.parametrize("method", ["load", "open"])
def test_what_the_user_must_mend_is_raised(caplog, method):
    worker = guarded(Raising(method, ConfigError("write it so")))
    with pytest.raises(ConfigError, match="write it so"):
        worker.wait()
    worker.close(True)
    assert not warned(caplog)


def test_the_local_file_fails_too(caplog):
    """Training continues even then, and the end says how much is lost."""
    FOLDER.write_text("a file")
    drive(guarded(Raising("write", OSError("no route"))))
    failed, second, told = warned(caplog)
    assert "no route" in failed
    assert "cannot be kept" in second
    assert told == f"0 records of list were kept in {FILE}; 10 more could not be written"


def test_no_secret_in_a_warning(caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-environment")
    error = ValueError("bad canary-given, canary-environment, https://me:canary@host, api_key=canary1")
    drive(guarded(Raising("open", error), secrets=["canary-given"]))
    text = " ".join(warned(caplog))
    assert "canary" not in text
    assert "bad ***, ***, https://***@host, api_key=***" in text


def test_a_long_reason_is_cut(caplog):
    drive(guarded(Raising("open", ValueError("x" * 10_000))))
    assert len(warned(caplog)[0]) < 1000


def test_a_forked_process_leaves_it_alone(caplog):
    sink = ListSink()
    worker = guarded(sink)
    worker.wait()

    def child():
        begin = time.monotonic()
        worker.close(False)
        assert time.monotonic() - begin < 100

    assert forked(child) == 0
    worker.write({"x": 1}, 1)
    worker.close(False)
    assert len(sink.rows) == 1
    assert worker._process == os.getpid()


def test_closing_twice_is_once():
    sink = ListSink()
    worker = guarded(sink)
    worker.close(True)
    worker.close(False)
    assert sink.calls[-1] == ("close", True)
    assert len(sink.calls) == 2
