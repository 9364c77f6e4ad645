"""Progress on a terminal, and plain lines everywhere else."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.rank_tasks import forks
from kit.scripts import Script
from zae import Trainer
from zae.display import lines, terminal
from zae.display.lines import Lines
from zae.display.terminal import Terminal
from zae.loop.run_view import Position

SCRIPT = """
import sys, time, torch
torch.manual_seed(3)
from zae import Trainer
class Task(Trainer):
    def train_step(self, batch):
        time.sleep(PAUSE)
        return {"loss": self.model(batch).square().mean()}
    def test_step(self, batch):
        return {**self.train_step(batch), "accuracy": 0.5}
model = torch.nn.Linear(2, 1)
trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.001), log_bar=LOG_BAR)
batches = [torch.ones(8, 2)] * 30
trainer.run(3, batches, batches[:2], valid_every=EVERY)
open(sys.argv[1], "w").write(str([model.weight.tolist(), torch.rand(1).item()]))
"""
EPOCHS = 3


LINE = (
    r"epoch {0}/3, step {1}, train_loss \d\.\d+, lr 0.001, valid_loss \d\.\d+, valid_accuracy 0\.5000, "
    r"time \S+s(, ETA \S+s)?, best"
)
SUMMARY = r"3 epochs, 90 steps, \S+s, \S+ steps/s; best: loss \S+ in epoch 3"


def script(folder: Path, pause: float = 0.0, log_bar: bool | str = "auto", every: str = "None") -> tuple[Path, str]:
    path = folder / "script.py"
    text = SCRIPT.replace("PAUSE", str(pause)).replace("LOG_BAR", repr(log_bar)).replace("EVERY", every)
    path.write_text(text)
    return path, str(folder / "end.txt")


def on_a_terminal(command: tuple[Path, str], columns: int = 120, **environment: str) -> str:
    """Run a script with a pseudo-terminal for what it writes; return all of that."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = Script(*command, terminal=slave, **{"TERM": "xterm", "CI": "", **environment})
    os.close(slave)
    out, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        ready, _, _ = select.select([master], [], [], 1.0)
        if ready:
            try:
                part = os.read(master, 65536)
            except OSError:  # The other side is closed.
                break
            if not part:
                break
            out += part
    os.close(master)
    status, _, error = process.end()
    assert status == 0, out.decode() + error
    return out.decode()


def screen(text: str) -> list[str]:
    """The lines that are left to see: what a carriage return overwrote is gone."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        if "".join(cells).strip():
            lines.append("".join(cells).rstrip())
    return lines


@pytest.fixture(scope="module")
def shown(tmp_path_factory: Any) -> tuple[str, float, str]:
    """What a run writes to a terminal, its seconds, and its end."""
    folder = tmp_path_factory.mktemp("terminal")
    begin = time.monotonic()
    text = on_a_terminal(script(folder, pause=0.01))
    return text, time.monotonic() - begin, (folder / "end.txt").read_text()


def test_one_line_an_epoch_and_one_bar(shown: Any) -> None:
    """A header, a line for each epoch, a summary, and never two bars at once; at most 10 redraws in a second."""
    text, seconds, _ = shown
    header, *rows, summary = screen(text)
    assert header.split() == ["epoch", "step", "train_loss", "lr", "valid_loss", "valid_accuracy", "time", "steps/s"]
    assert [row.split()[:2] for row in rows] == [["1", "30"], ["2", "60"], ["3", "90"]]
    assert len(rows) == EPOCHS
    assert re.fullmatch(r"3 epochs, 90 steps, \S+s, \S+ steps/s; best: \S+ \S+ in epoch 3", summary)
    assert all(row.endswith("best") for row in rows)
    bars = re.findall(r"epoch (\d)/3 \|", text)
    assert bars == sorted(bars), "the bar of an epoch is closed before the next"
    assert set(bars) == {"1", "2", "3"}
    assert "\x1b[A" not in text, "a second bar would move the cursor"
    assert len(bars) <= 10 * seconds
    assert re.search(r"epoch 1/3 \|.*\| \d+/30, \S+s, ETA \S+s, \S+ steps/s, loss [\d.e-]+, lr 0.001", text)


def test_lines_fit_into_narrow_terminals(tmp_path: Path) -> None:
    """In 50 columns the accuracy, the learning rate and the speed are left out; nothing is wrapped."""
    text = on_a_terminal(script(tmp_path, pause=0.01), columns=50)
    header, *rows = screen(text)
    assert header.split() == ["epoch", "step", "train_loss", "valid_loss", "time"]
    assert [row.split()[0] for row in rows[:3]] == ["1", "2", "3"]
    assert " ".join(rows[3:]).startswith("3 epochs, 90 steps, ")
    assert max(map(len, re.split(r"[\r\n]+", text))) < 50
    assert re.search(r"epoch \d/3 \|.*\| \d+/30, ETA \S+s", text)


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TERM": "dumb"}])
def test_whole_lines_where_a_log_is_kept(tmp_path: Path, environment: dict[str, str]) -> None:
    """A terminal of a CI service, or one that cannot overwrite: the lines of a pipe, unless the bar was asked for."""
    check_lines(on_a_terminal(script(tmp_path), **environment).replace("\r\n", "\n"))
    assert len(re.findall(r"epoch \d/3 \|", on_a_terminal(script(tmp_path, log_bar="bar"), **environment))) >= EPOCHS


def check_lines(text: str) -> None:
    """A line for each epoch and a summary; they have no colour, and nothing that overwrites."""
    assert [sign for sign in text if sign < " " and sign != "\n"] == []
    *rows, summary = text.splitlines()
    assert len(rows) == EPOCHS
    for epoch, row in enumerate(rows, 1):
        assert re.fullmatch(LINE.format(epoch, epoch * 30), row), row
    assert re.fullmatch(SUMMARY, summary), summary


def test_columns_that_come_later_have_a_place(tmp_path: Path) -> None:
    """A validation every second epoch: the line of an epoch without one does not show that of another epoch."""
    rows = [line.split() for line in screen(on_a_terminal(script(tmp_path, every="__import__('zae').Every(epochs=2)")))]
    assert [row[:2] for row in rows[:-1] if row[0].isdigit()] == [["1", "30"], ["2", "60"], ["3", "90"]]
    assert [row[0] for row in rows] == ["epoch", "1", "epoch", "2", "3", "3"]
    assert rows[4][4:6] == ["-", "-"]


def test_no_color(tmp_path: Path, shown: Any) -> None:
    """No colour on a terminal with NO_COLOR, nor without."""
    for text in (shown[0], on_a_terminal(script(tmp_path), NO_COLOR="1")):
        assert re.findall(r"\x1b\[[0-9;]*m", text) == []


@pytest.mark.parametrize("log_bar", ["auto", True, "lines"])
def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, shown: Any, log_bar: bool | str) -> None:
    """A file or a pipe gets a line for each epoch on standard error; the end is that of a run on a terminal."""
    status, out, error = Script(*script(tmp_path, log_bar=log_bar)).end()
    assert (status, out) == (0, "")
    check_lines(error)
    assert (tmp_path / "end.txt").read_text() == shown[2]


def test_what_is_asked_for_is_shown_anywhere(tmp_path: Path) -> None:
    """Lines on a terminal, the bar in a pipe, and nothing with False."""
    check_lines(on_a_terminal(script(tmp_path, log_bar="lines")).replace("\r\n", "\n"))
    status, out, error = Script(*script(tmp_path, log_bar="bar")).end()
    assert (status, out) == (0, "")
    assert {"1", "2", "3"} == set(re.findall(r"epoch (\d)/3 \|", error))
    assert on_a_terminal(script(tmp_path, log_bar=False)) == ""
    assert Script(*script(tmp_path, log_bar=False)).end() == (0, "", "")


def test_lines_stand_beside_those_of_print_and_logging(tmp_path: Path) -> None:
    """Each is whole, in the order in which they were written, also where both streams are one."""
    path, end = script(tmp_path)
    begun = "        time.sleep(0.0)\n"
    beside = begun + "        print('printed', flush=True); import logging; logging.getLogger('mine').error('logged')\n"
    path.write_text(path.read_text().replace(begun, beside))
    with (tmp_path / "log").open("w+") as both:
        assert Script(path, end, terminal=both.fileno()).end()[0] == 0
        both.seek(0)
        text = both.read()
    check_lines("\n".join(line for line in text.splitlines() if line not in ("printed", "logged")))
    assert text.count("printed\nlogged\n") == text.count("printed") > EPOCHS * 30


BESIDE = """
        step = self.progress_checker.step
        if step == 3: print("printed")
        if step == 4: print("begun", end=" "); print("ended")
        if step == 5: import warnings; warnings.warn("warned of")
        if step == 6: import logging; logging.getLogger("mine").error("logged")
        if step == 7: print("one\\ntwo")
        if step == 8: sys.stderr.write("to standard error\\n")
        if step == 9:
            from tqdm import tqdm
            for _ in tqdm(range(3), desc="inner", leave=False): time.sleep(0.15)
        if step == 10: print("left open", end="")
        if step == 1: print("\\033[31mcolored\\033[0m")
        if step == 2: sys.stderr.write("\\033[1;32mcolored error\\033[m\\n")
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_what_a_step_writes_is_in_whole_lines_above_the_bar(tmp_path: Path, columns: int) -> None:
    path, end = script(tmp_path, pause=0.02)
    text = path.read_text().replace("        time.sleep(0.02)\n", f"        time.sleep(0.02){BESIDE}")
    handler = "import logging; logging.basicConfig(format='%(message)s')\nimport sys; before = sys.stdout, sys.stderr\n"
    path.write_text(f"{handler}{text}assert (sys.stdout, sys.stderr) == before\n")
    lines = screen(re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal((path, end), columns)))
    for line in ("printed", "begun ended", "logged", "one", "two", "to standard error", "colored", "colored error"):
        assert line in lines, lines
    assert any(line.endswith("UserWarning: warned of") for line in lines)
    assert "left open" in lines
    assert not [
        line for line in lines if re.search(r"epoch \d/3 \|.*(printed|begun|warned|logged|one|two|colored)", line)
    ]


@pytest.mark.exhaustive
def test_a_standard_error_that_takes_nothing_does_not_end_the_run(tmp_path: Path, shown: Any) -> None:
    """A reader that is gone after the first line, and a full disk: the exit status and the end are as ever."""
    path, end = script(tmp_path, pause=0.003)
    reader, writer = os.pipe()
    run = Script(path, end, terminal=writer)
    os.close(writer)
    assert re.fullmatch(LINE.format(1, 30), os.read(reader, 4096).decode().splitlines()[0])
    os.close(reader)
    assert run.end()[0] == 0
    assert (tmp_path / "end.txt").read_text() == shown[2]
    (tmp_path / "end.txt").unlink()
    with open("/dev/full", "w") as full:  # By an interpreter of its own, which flushes the stream as it ends.
        assert subprocess.run([sys.executable, path, end], stderr=full).returncode == 0
    assert (tmp_path / "end.txt").read_text() == shown[2]


RANKS = """
import torch
from zae import Trainer
from zae.addons import MultiGPUAddon
from torch.utils.data import DataLoader
class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}
    def test_step(self, batch):
        return {**self.train_step(batch), "accuracy": 0.5}
if __name__ == "__main__":
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    trainer = Task.add_on(MultiGPUAddon)(model, ["cpu", "cpu"], optimizer=optimizer)
    trainer.run(3, DataLoader(torch.ones(480, 2), 8), DataLoader(torch.ones(16, 2), 8))
"""


def test_only_rank_0_writes_lines(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    with forks():
        status, out, error = Script(tmp_path / "ranks.py").end()
    assert (status, out) == (0, ""), error
    check_lines(error)


def test_a_bar_is_closed_when_a_step_fails(tmp_path: Path) -> None:
    """The traceback begins on its own line."""
    command = script(tmp_path, pause=0.02)
    path = command[0]
    failing = "        if self.progress_checker.step == 40: raise SystemExit(0)\n        time.sleep"
    path.write_text(path.read_text().replace("        time.sleep", failing))
    seen = screen(on_a_terminal(command))
    assert [line.split()[0] for line in seen] == ["epoch", "1"]


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


class Steps:
    """A run that has made so many steps of 2,000."""

    step = 0

    def position(self) -> Position:
        return Position(1, 2, self.step, 2000, self.step, 4000 - self.step)

    def current(self) -> dict[str, float]:
        return {"loss": 0.5}

    def last_row(self) -> tuple[dict[str, Any], str]:
        return {"epoch": 1, "train_loss": 0.5}, "best"

    def last_validation(self) -> tuple[dict[str, Any], str]:
        return {"epoch": 1, "step": self.step, "valid_loss": 0.25}, ""

    def ending(self) -> list[str]:
        return []

    def metrics(self) -> Any:
        raise AssertionError("a terminal shows no history")


def test_redraws_are_bound_to_time_not_to_steps(monkeypatch: Any) -> None:
    """2,000 steps of a millisecond are drawn ten times, and what is known is shown as it was measured."""
    now = itertools.count(step=0.001)
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    seen = Screen()
    monkeypatch.setattr(sys, "stderr", seen)
    shown, run = Terminal(), Steps()
    shown.open(run)
    for run.step in range(1, 2001):
        if shown.due():
            shown.update(run)
    shown.end_epoch(run)
    shown.line(run)
    bars = re.findall(r"epoch 1/2 \|.*?\| (\d+)/2000, (\S+), ETA (\S+), (\S+) steps/s, loss 0.5000", seen.getvalue())
    assert len(bars) in (9, 10)
    assert int(bars[-1][0]) >= 1700
    assert bars[-1][1] == "1.8s"
    assert bars[-1][2] == "2.2s"
    assert screen(seen.getvalue())[-1].split()[:3] == ["1", "0.5000", "2.0s"]


def test_lines_within_an_epoch_are_bound_to_time(monkeypatch: Any) -> None:
    """200 validations in 2 seconds have two lines, and an hour without any says each minute where it is."""
    now = [0.0]
    monkeypatch.setattr(lines, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    seen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", seen)
    shown, run = Lines(), Steps()
    shown.open(run)
    for run.step in range(1, 201):
        now[0] += 0.01
        shown.validation(run)
    validated = seen.getvalue().splitlines()
    assert [line.rpartition(", time")[0] for line in validated] == [
        "epoch 1/2, step 1, valid_loss 0.2500", "epoch 1/2, step 101, valid_loss 0.2500",
    ]  # fmt: skip
    for run.step in range(201, 1281):
        now[0] += 10 / 3
        if shown.due():
            shown.update(run)
    hour = seen.getvalue().splitlines()[len(validated) :]
    assert 55 <= len(hour) <= 60
    said = re.compile(r"epoch 1/2, step \d+, \d+ of 2000 in this epoch, loss 0.5000, time .*")
    assert all(map(said.fullmatch, hour))


def test_a_sentence_does_not_break_the_bar(monkeypatch: Any) -> None:
    seen = Screen()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setenv("COLUMNS", "100")
    shown, run = Terminal(), Steps()
    shown.open(run)
    shown.report(run, "resumed from \x1b[2J step 3")
    shown.report(run, "word " * 40)
    assert screen(seen.getvalue())[0] == "resumed from \\x1b[2J step 3"
    assert max(map(len, screen(seen.getvalue()))) <= 100
    assert screen(seen.getvalue())[-1].startswith("epoch 1/2 |")
    shown.close(run)


class Quick(Trainer):
    """Two epochs on a terminal that is closed at step ``leaves``."""

    leaves = 0
    master = -1

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        self.current_run.display._next = 0.0  # Each step redraws.
        if self.progress_checker.step == self.leaves:
            os.close(self.master)
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def run_quick(leaves: int = -1, master: int = -1) -> Quick:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    trainer = Quick(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    trainer.leaves, trainer.master = leaves, master
    trainer.run(2, [torch.ones(8, 2)] * 4)
    return trainer


@pytest.mark.parametrize("leaves", [0, 2, 3, 5])
def test_a_terminal_that_is_closed_does_not_end_the_run(monkeypatch: Any, leaves: int) -> None:
    """Somebody logs out, and writing to the terminal fails from then on; training continues, and shows nothing."""
    plain = run_quick()
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    shown = run_quick(leaves, master)
    with pytest.raises(OSError, match="Input/output"):
        stream.close()
    assert shown.metrics["step"] == plain.metrics["step"] == 8
    assert torch.equal(shown.model.weight, plain.model.weight)


def test_a_process_without_standard_error_trains(monkeypatch: Any, tmp_path: Path) -> None:
    """A program without a console has None there, a daemon may have closed it, and a tool may have put its own."""
    closed = (tmp_path / "closed").open("w")
    closed.close()
    tee = type("Tee", (), {"write": lambda self, text: len(text), "flush": lambda self: None})()
    for stream in (None, closed, tee):
        monkeypatch.setattr(sys, "stderr", stream)
        assert run_quick().metrics["step"] == 8


def test_names_in_a_state_do_not_act_on_the_terminal(monkeypatch: Any, capsys: Any) -> None:
    """Neither in the bar, nor in the line of an epoch, nor in the table; of an epoch that was left open."""

    def build() -> Quick:
        model = torch.nn.Linear(2, 1)
        return Quick(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01))

    first, second, seen = build(), build(), Screen()
    first.leaves = second.leaves = -1
    batches = [torch.ones(8, 2)] * 4
    first.run(2, batches, max_steps=6)
    state = first.state_dict()
    records, name = state["records"], "\x1b[2Jname"
    records["log_train"]["series"][name] = records["log_train"]["series"]["loss"]
    records["train_history"] = [{**row, name: "\x1b]0;text\x07"} for row in records["train_history"]]
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr(Terminal, "interval", 0.0)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    second.load_state_dict(state)
    second.run(1, batches)
    print(second.metrics)
    bars, table = seen.getvalue(), capsys.readouterr().out
    assert re.search(r"loss \S+, \\x1b\[2Jname \S+, lr", bars)
    assert re.search(r"epoch +step .*train_\\x1b\[2Jname", bars)
    assert re.search(r"epoch +step .*\\x1b\[2Jname(.|\n)*\\x1b\]0;text\\x07", table)
    assert not {"\x1b", "\x07"} & set(bars + table)


def test_a_best_validation_within_an_epoch_is_marked_in_the_row_of_the_epoch(capsys: Any) -> None:
    """And the summary names its step."""

    class Scripted(Trainer):
        losses = iter([0.1, 0.5, 0.4, 0.3])

        def train_step(self, batch: Any) -> Any:
            return {"loss": self.model(batch).square().mean()}

        def test_step(self, batch: Any) -> Any:
            return {"loss": next(self.losses)}

    batches = [torch.ones(8, 2)] * 4
    trainer = Scripted(torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD, log_bar="lines")
    trainer.run(2, batches, batches[:1], valid_every=2)
    *rows, summary = capsys.readouterr().err.splitlines()
    of_epochs = [row for row in rows if "train_loss" in row]
    assert [row.rpartition(", ")[2] == "(best)" for row in of_epochs] == [True, False]
    assert "best: loss 0.1 in epoch 1, at step 2" in summary
    assert str(trainer.metrics).splitlines()[1].endswith("best"), "its own row has it in the table"
