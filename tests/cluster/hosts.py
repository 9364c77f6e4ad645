"""Hosts on one machine: each a network namespace with its name and address, joined to the others by a bridge."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.needs import need_root_and

TESTS = Path(__file__).parents[1]
ADDRESS = "10.88.0.{}"
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until a condition is true; fail the test where it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds:g} s: no {what}")
        time.sleep(0.1)


class Program:
    """A program that runs on a host, with all that it writes in a file."""

    def __init__(self, command: list[str], environment: dict[str, str], output: Path) -> None:
        self._output = output
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self, seconds: float = 240) -> int:
        """Wait for its end, and return its exit status."""
        wait_for(lambda: not self.is_running, f"end of {self.process.args}\n{self.output[-5000:]}", seconds)
        return self.process.returncode


class Hosts:
    """Hosts by name, with the addresses 10.88.0.1, 10.88.0.2 and so on. The disk is shared."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._spaces = {name: f"zae-{os.getpid()}-{name}" for name in names}
        self._switch = f"zae-{os.getpid()}-switch"
        self._file = Path("hosts").absolute()
        self._programs: list[Program] = []

    def connect(self) -> None:
        """Make the hosts, and join them."""
        need_root_and({"ip": "iproute2"})
        addresses = {name: ADDRESS.format(number) for number, name in enumerate(self.names, start=1)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        self._file.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
        _ip("netns add", self._switch)
        self._ip(self._switch, "link add bridge type bridge")
        self._ip(self._switch, "link set bridge up")
        for name, address in addresses.items():
            space = self._spaces[name]
            _ip("netns add", space)
            self._ip(self._switch, f"link add {name} type veth peer name eth0 netns {space}")
            self._ip(self._switch, f"link set {name} master bridge up")
            self._ip(space, "link set lo up")
            self._ip(space, f"addr add {address}/24 dev eth0")
            self._ip(space, "link set eth0 up")

    def start(self, name: str, *command: object, **environment: object) -> Program:
        """Start a program on a host."""
        words = [*self._enter(name), *map(str, command)]
        output = Path(f"{name}-{len(self._programs)}.log")
        self._programs.append(Program(words, _environment(environment), output))
        return self._programs[-1]

    def run(self, name: str, *command: object, **environment: object) -> str:
        """Run a program on a host to its end, and return what it wrote; an error where it fails."""
        words = [*self._enter(name), *map(str, command)]
        done = subprocess.run(words, env=_environment(environment), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _enter(self, name: str) -> list[str]:
        """Return the words before a command that let it run on a host, under its name."""
        space = ["ip", "netns", "exec", self._spaces[name]]
        return [*space, "unshare", "--uts", "bash", "-c", ENTER, "enter", name, str(self._file)]

    def set_link(self, name: str, state: str) -> None:
        """Pull the network cable of a host ("down"), or plug it in again ("up")."""
        self._ip(self._switch, f"link set {name} {state}")

    def lose(self, name: str) -> None:
        """Turn off the power of a host: nothing that it says any more is heard."""
        self.set_link(name, "down")
        self.kill_all(name)

    def kill_all(self, name: str) -> None:
        """Kill all that runs on a host."""
        self._kill(self._spaces[name])

    def close(self) -> None:
        """End all that runs on the hosts, and remove them."""
        for space in (*self._spaces.values(), self._switch):
            self._kill(space)
            subprocess.run(["ip", "netns", "delete", space], check=False)
        for program in self._programs:
            program.process.wait()

    @staticmethod
    def _kill(space: str) -> None:
        for process in subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    @staticmethod
    def _ip(space: str, line: str) -> None:
        _ip("-netns", space, line)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *" ".join(words).split()], check=True)


def _environment(more: dict[str, object]) -> dict[str, str]:
    """Return the variables of a program: no launcher's, one thread, and the Python of these tests first."""
    known = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]
    modules = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    fixed = {"PATH": os.pathsep.join(paths), "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return known | fixed | {key: str(value) for key, value in more.items()}
