"""A sink that raises or blocks costs neither records nor time, nor the other sinks anything."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.loggers import ListSink, forked, lines, warned
from zae import ConfigError, LoggerError, ZaeError
from zae.addons.loggers.base import RunInfo
from zae.addons.loggers.worker import SinkGroup

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


class Direct(ListSink):
    """Of a client with a queue of its own."""

    name = "direct"
    has_queue = True


def group_of(*sinks, timeout=120.0, **options):
    """The sinks of a run, which are not open yet."""
    return SinkGroup(sinks, RunInfo("r1", timeout=timeout), FOLDER, **options)


def hurry(group, method):
    """Give the call that is to block, and it alone, a time limit that is soon over."""
    (sink,) = group.sinks
    if getattr(sink.sink, "method", "") == method:
        if method == "write":
            assert sink.sink.reached.wait(120)
        group._queue.timeout = 0.3


def drive(group, count=10, flushes=1):
    """Open, write, flush so often, and close; return the seconds that took."""
    begin = time.monotonic()
    hurry(group, "open")
    group.open()
    for step in range(1, count + 1):
        group.write({"x": step / 2}, step)
    hurry(group, "write")
    hurry(group, "flush")
    for _ in range(flushes):
        group.flush()
    hurry(group, "close")
    group.close(False)
    return time.monotonic() - begin


def test_calls_arrive_in_order():
    sink = ListSink()
    drive(group_of(sink), 3)
    assert [call[0] for call in sink.calls] == ["open", "write", "write", "write", "flush", "close"]
    assert not FOLDER.exists()
    assert not [t for t in threading.enumerate() if t.name == "zae-loggers" and (t.join(120) or t.is_alive())]


@pytest.mark.parametrize("at", [0, 6, 9])
def test_fault_a_write_that_raises(caplog, at):
    """One warning with reason and remedy, every record kept, and their number told once, at the end."""
    sink = Raising("write", ValueError("bad\n  \x1b[31mnews\x1b[0m"), at)
    drive(group_of(sink))
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
    drive(group_of(sink))
    assert len(warned(caplog)) == 2
    assert str(error) in warned(caplog)[0]
    assert [row["step"] for row in lines(FILE)] == list(range(1, 11))


@pytest.mark.parametrize(
    ("method", "at", "kept"), [("open", 0, 10), ("write", 0, 10), ("write", 6, 4), ("flush", 0, 0)]
)
def test_fault_a_sink_that_blocks(caplog, method, at, kept):
    """It costs its time limit once, not at every call."""
    sink = Blocking(method, at)
    took = drive(group_of(sink), flushes=100)
    assert 0.25 < took < 15
    assert f"its {method}() has not returned within 0.3 s" in warned(caplog)[0]
    assert len(warned(caplog)) == 1 + bool(kept)
    assert [row["step"] for row in (lines(FILE) if kept else [])] == list(range(11 - kept, 11))
    sink.free.set()


def test_fault_a_close_that_blocks(caplog):
    sink = Blocking("close")
    assert drive(group_of(sink)) < 100
    assert "its close() has not returned" in warned(caplog)[0]
    assert len(warned(caplog)) == 1
    assert len(sink.rows) == 10
    sink.free.set()


def test_a_slow_sink_is_no_failed_one(caplog):
    """Training does not wait while a record is written, whose limit begins when somebody waits for it."""
    sink = Blocking("write")
    group = group_of(sink)
    group.open()
    for step in range(20):
        group.write({}, step)
    assert sink.rows == []
    sink.free.set()
    group.close(False)
    assert len(sink.rows) == 20
    assert not warned(caplog)


@pytest.mark.parametrize("method", ["open", "write", "flush", "close"])
def test_fault_a_sink_that_blocks_holds_up_no_other_one(caplog, method):
    """Another thread makes the calls of the others; a client with a queue of its own has each record at once."""
    blocking, other, direct = Blocking(method), ListSink(), Direct()
    group = group_of(blocking, other, direct, timeout=0.3)
    group.open()
    for step in range(1, 4):
        group.write({"x": step}, step)
        assert [at for _, at in direct.rows] == [*range(1, step + 1)]
    group.flush()
    group.close(False)
    for sink in (other, direct):
        assert [call[0] for call in sink.calls] == ["open", "write", "write", "write", "flush", "close"]
    assert f"its {method}() has not returned within 0.3 s" in warned(caplog)[0]
    blocking.free.set()


def test_fault_a_direct_write_that_raises(caplog):
    """Training goes on, and the record that was refused is the first one in the local file."""

    class Refusing(Direct):
        def write(self, metrics, step):
            if step == 3:
                raise SystemExit(3)
            super().write(metrics, step)

    sink = Refusing()
    drive(group_of(sink), 5)
    assert [step for _, step in sink.rows] == [1, 2]
    assert [row["step"] for row in lines(FOLDER / "direct-r1.jsonl")] == [3, 4, 5]
    assert len(warned(caplog)) == 2


@pytest.mark.parametrize("method", ["open", "write"])
def test_fault_what_comes_back_late_is_left_as_it_is(method):
    """Closing may draw random numbers, and the run, or the next one, may be training by then."""
    sink = Blocking(method)
    group = group_of(sink)
    drive(group, 2)
    before = threading.active_count()
    sink.free.set()
    while threading.active_count() == before:
        time.sleep(0.01)
    assert [call[0] for call in sink.calls] == ["open", "write"][: 1 + (method == "write")]


@pytest.mark.parametrize("make", [lambda: Raising("open", OSError("no route")), lambda: Blocking("open")])
def test_fault_required_raises_instead(caplog, make):
    sink = make()
    group = group_of(sink, required=True, timeout=0.3 if isinstance(sink, Blocking) else 120.0)
    with pytest.raises(LoggerError, match="logger_required=False") as caught:
        group.open()
    assert isinstance(caught.value, ZaeError)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None  # the client's own error, with what it was given, is not shown
    group.write({"x": 1}, 1)
    group.close(True)
    assert not warned(caplog)
    assert not FOLDER.exists()
    getattr(sink, "free", threading.Event()).set()


@pytest.mark.parametrize("has_queue", [False, True])
def test_fault_required_raises_at_the_record(caplog, has_queue):
    sink = Raising("write", ValueError("bad"), at=6)
    sink.has_queue = has_queue
    group = group_of(sink, required=True)
    group.open()
    for step in range(1, 7):
        group.write({"x": 1}, step)
    with pytest.raises(LoggerError, match="list failed: ValueError: bad"):
        group.write({"x": 1}, 7)
    group.close(True)


@pytest.mark.parametrize("method", ["load", "open"])
def test_what_the_user_must_mend_is_raised(caplog, method):
    group = group_of(Raising(method, ConfigError("write it so")))
    with pytest.raises(ConfigError, match="write it so"):
        group.open()
    group.close(True)
    assert not warned(caplog)


def test_the_local_file_fails_too(caplog):
    """Training continues even then, and the end says how much is lost."""
    FOLDER.write_text("a file")
    drive(group_of(Raising("write", OSError("no route"))))
    failed, second, told = warned(caplog)
    assert "no route" in failed
    assert "cannot be kept" in second
    assert told == f"0 records of list were kept in {FILE}; 10 more could not be written"


def test_no_secret_in_a_warning(caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-environment")
    error = ValueError("bad canary-given, canary-environment, https://me:canary@host, api_key=canary1")
    drive(group_of(Raising("open", error), secrets=["canary-given"]))
    text = " ".join(warned(caplog))
    assert "canary" not in text
    assert "bad ***, ***, https://***@host, api_key=***" in text


def test_a_long_reason_is_cut(caplog):
    drive(group_of(Raising("open", ValueError("x" * 10_000))))
    assert len(warned(caplog)[0]) < 1000


def test_a_forked_process_leaves_it_alone(caplog):
    sink = ListSink()
    group = group_of(sink)
    group.open()
    begin = time.monotonic()
    assert forked(group._close_at_exit) == 0
    assert time.monotonic() - begin < 100
    group.write({"x": 1}, 1)
    group.close(False)
    assert len(sink.rows) == 1


def test_an_exit_writes_what_is_pending(tmp_path):
    """Of a script that never closes its trainer."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from zae.addons.loggers.base import RunInfo, Sink\n"
        "from zae.addons.loggers.worker import SinkGroup\n"
        "class Slow(Sink):\n"
        "    def write(self, metrics, step):\n"
        "        time.sleep(0.05); print('write', step, flush=True)\n"
        "    def close(self, failed):\n"
        "        print('close', failed, flush=True)\n"
        "group = SinkGroup([Slow()], RunInfo('r1', timeout=60), Path('offline'))\n"
        "group.open()\n"
        "for step in range(5): group.write({}, step)\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [*(f"write {step}" for step in range(5)), "close False"]


def test_closing_twice_is_once():
    sink = ListSink()
    group = group_of(sink)
    group.open()
    group.close(True)
    group.close(False)
    assert sink.calls[-1] == ("close", True)
    assert len(sink.calls) == 2
