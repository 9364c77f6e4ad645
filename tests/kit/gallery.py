"""The examples of the gallery: what each must reach, which files it leaves, and how it is run without a network."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CPU_SECONDS = 60
NO_NETWORK = '''
import os, sys

LOOPBACK = (None, "", "localhost", "127.0.0.1", "::1", os.uname().nodename, "0.0.0.0", "::")

def refuse(event, arguments):
    """Note what would leave this machine, and refuse it; ranks and their store talk over the loopback interface."""
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"):
        place = arguments[1]
        host = place[0] if isinstance(place, tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in LOOPBACK:
        with open(os.environ["GALLERY_NETWORK"], "a") as file:
            print(event, host, file=file)
        raise PermissionError(f"the gallery has no network: {event} to {host}")

sys.addaudithook(refuse)
'''
"""A ``sitecustomize.py``, which each Python that starts imports: the script, and the processes that it starts."""


@dataclass(frozen=True)
class Series:
    """A curve of a plot: one key of a log."""

    label: str
    log: str
    key: str


@dataclass(frozen=True)
class Plot:
    """One plot of an example's picture; ``line`` is a value to compare with, a group of the pattern."""

    title: str
    series: tuple[Series, ...]
    scale: str = "linear"
    line: tuple[str, str] | None = None


@dataclass(frozen=True)
class Example:
    """One example; the groups of ``pattern``, which its whole output matches, are the numbers of ``passes``."""

    name: str
    title: str
    pattern: str
    score: str  # What is measured, with the groups of the pattern in braces.
    floor: str  # What it must reach, in words, with groups too.
    passes: Callable[[dict[str, float]], bool]
    files: tuple[str, ...]
    plots: tuple[Plot, ...]
    links: tuple[str, ...]
    pictures: tuple[tuple[str, str], ...] = ()
    folder: str = "gallery"
    extras: str = "examples"

    @property
    def path(self) -> Path:
        """The script."""
        return EXAMPLES / self.folder / f"{self.name}.py"

    @property
    def digest(self) -> str:
        """The hash of the script."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def texts(self, output: str) -> dict[str, str]:
        """Return the numbers that it printed, by name and as it printed them; its whole output has to match."""
        found = re.fullmatch(self.pattern, output)
        assert found, f"the output of {self.path.name} does not match {self.pattern!r}:\n{output}"
        return found.groupdict()

    def numbers(self, output: str) -> dict[str, float]:
        """Return the numbers that it printed."""
        return {name: float(value) for name, value in self.texts(output).items()}


@dataclass(frozen=True)
class Outcome:
    """How one run of an example ended."""

    script: str  # The hash of what was run.
    status: int
    output: str
    errors: str
    cpu_seconds: float
    network: str
    files: tuple[str, ...]


def run(example: Example, folder: Path) -> Outcome:
    """Run an example in an empty folder by an interpreter of its own, without a network, as a user starts it."""
    assert list(folder.iterdir()) == []
    script = example.digest
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
        tried = Path(place, "network")
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GALLERY_NETWORK": str(tried)}
        with open(Path(place, "out"), "w+") as out, open(Path(place, "err"), "w+") as err:
            process = subprocess.Popen(
                [sys.executable, example.path], cwd=folder, env=environment, stdout=out, stderr=err
            )
            _, status, used = os.wait4(process.pid, 0)  # The time of its processes that it waited for is in it.
            process.returncode = os.waitstatus_to_exitcode(status)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        network = tried.read_text() if tried.exists() else ""
    files = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    return Outcome(script, process.returncode, *texts, used.ru_utime + used.ru_stime, network, files)


def check(example: Example, outcome: Outcome) -> None:
    """Assert that a run ended well, reached its floor, stayed on this machine, and left the files that it says."""
    from kit.scripts import besides_progress

    assert (outcome.status, besides_progress(outcome.errors)) == (0, ""), (outcome.status, outcome.errors)
    assert outcome.network == ""
    assert example.passes(example.numbers(outcome.output)), outcome.output
    assert [name for name in outcome.files if not any(fnmatch(name, each) for each in example.files)] == []
    assert [each for each in example.files if not any(fnmatch(name, each) for name in outcome.files)] == []
    assert outcome.cpu_seconds <= CPU_SECONDS
