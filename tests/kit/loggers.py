"""What the tests of the loggers share: a small task, a recording sink, servers that do not serve, and a fork."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import signal
import socket
import struct
import threading
import time
import traceback
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons.loggers.base import Sink
from zae.addons.loggers.logger import LoggerAddon


class Task(Trainer):
    """Regression with dropout: every step draws from the random stream that a logger must leave alone."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}

    test_step = train_step


def build(*add_ons, task=Task, device="cpu", **options):
    """Make a trainer that is the same each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"log_bar": False, "log_every": 1, "seed": 1, **options}
    return task.add_on(*add_ons)(model, device, optimizer=optimizer, **options)


def loader(batches=4):
    """Batches of 4, in an order drawn from the global stream."""
    inputs = torch.arange(batches * 12.0).reshape(-1, 3).div(batches * 12)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def digest(trainer):
    """The SHA-256 of all weights."""
    blobs = [value.numpy().tobytes() for value in trainer.unwrap().state_dict().values()]
    return hashlib.sha256(b"".join(blobs)).hexdigest()


def lines(path):
    """The records of a file of JSON lines, read strictly, without the times and the lines that describe the run."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert all(row.pop("unix_time") > 1.7e9 for row in rows)
    return [row for row in rows if "run" not in row]


def bare(rows):
    """Records without where they were made, to compare them with ``log_history``."""
    return [{key: value for key, value in row.items() if key not in ("epoch", "batch")} for row in rows]


class ListSink(Sink):
    """Keep what it is told."""

    name = "list"
    remedy = "nothing can be done"

    def __init__(self):
        self.calls = []

    def open(self, info):
        self.calls.append(("open", info))

    def write(self, metrics, step):
        self.calls.append(("write", metrics, step))

    def flush(self):
        self.calls.append(("flush",))

    def close(self, failed):
        self.calls.append(("close", failed))

    @property
    def rows(self):
        """The records."""
        return [call[1:] for call in self.calls if call[0] == "write"]


class ListLoggerAddon(LoggerAddon):
    """Log to the sink that the test has put there."""

    sink = None

    def sinks(self):
        """Add it."""
        return [*super().sinks(), ListLoggerAddon.sink]


def listing(sink=None, **options):
    """A trainer that logs to a sink of the test's own."""
    ListLoggerAddon.sink = sink or ListSink()
    return build(ListLoggerAddon, **options)


def warned(caplog):
    """The warnings of zae."""
    return [r.getMessage() for r in caplog.records if r.name == "zae" and r.levelname == "WARNING"]


@contextlib.contextmanager
def server(kind):
    """A loopback port that refuses, accepts and never replies ("silent"), or replies 500 to everything ("500")."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    kept = []

    def reply(connection):
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def serve():
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                if kind == "500":
                    threading.Thread(target=reply, args=(kept[-1],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    if kind == "refuses":
        listener.close()
    else:
        listener.listen(50)
        thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if kind != "refuses":
            listener.shutdown(socket.SHUT_RDWR)  # Else the thread accepts one more.
            thread.join()
        listener.close()
        for connection in kept:
            connection.close()


def forked(function):
    """Run a function in a fork of this process, and return its exit status; torch is imported already."""
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # What earlier tests left to the collector may have threads that are not here.
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Killed(Task):
    """Kill the process at a step, as a power cut would: nothing is flushed, no handler runs."""

    at = None

    def train_step(self, batch):
        if self.progress_checker.step == Killed.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


def scalars(folder):
    """Every scalar that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def wandb_records(path):
    """Every record of a .wandb file: LevelDB's log format, blocks of 32 KiB, each chunk with CRC, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""  # seven bytes of header
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def finished_wandb_records(path):
    """Every record of a run that was finished: the client's service writes the last ones a moment later."""
    end = time.monotonic() + 120
    found = []
    while not any(r.WhichOneof("record_type") == "exit" for r in found) and time.monotonic() < end:
        time.sleep(0.02)
        found = list(wandb_records(path))
    return found


def wandb_history(paths=None, read=finished_wandb_records):
    """The rows of every run, in the order they were made."""
    rows = []
    for path in paths or sorted(Path("wandb").glob("*run-*/*.wandb")):
        for record in read(path):
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows
