"""Scripts as a user starts them, but in a fork of this process, which has imported torch: they begin at once."""

from __future__ import annotations

import importlib
import logging
import os
import re
import runpy
import sys
import tempfile
import types
import warnings
from pathlib import Path

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

from kit.faults import Child

_PROGRESS = re.compile(
    r"epoch \d+(/\d+)?, step \d+(, [^,]+)*|[\d,]+ epochs?, [\d,]+ steps?, .*|resumed from step .*|already finished; .*"
)


def besides_progress(error: str) -> str:
    """What a run has written to standard error beside the plain lines of its progress."""
    return "".join(line for line in error.splitlines(keepends=True) if not _PROGRESS.fullmatch(line.rstrip("\n")))


def importing_from(*places: Path | str) -> str:
    """Return the first lines of a script that imports zae, and the tools of the tests, anew from these places."""
    return f"""
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("zae", "kit")]:
    del sys.modules[name]
sys.path[:0] = {[*map(str, places)]!r}
"""


class Script(Child):
    """A script that runs as ``__main__`` in the present folder, with what it writes kept, or written to a terminal.

    The script is a file, or text as of standard input.
    """

    def __init__(self, path: Path | str, *arguments: str, terminal: int | None = None, **environment: str) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in ("out", "err")]  # noqa: SIM115
        streams = [file.fileno() if terminal is None else terminal for file in self._files]
        super().__init__(_run, path, arguments, streams, environment)

    def end(self, seconds: float = 300.0) -> tuple[int, str, str]:
        """Wait for its end; return the exit status, and what it wrote to standard output and to standard error."""
        outcome = self.wait(seconds)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return outcome.status, texts[0], texts[1] + outcome.error


def _run(path: Path | str, arguments: tuple[str, ...], streams: list[int], environment: dict[str, str]) -> None:
    """Forget what pytest has set up for the test, and run the script."""
    importlib.reload(warnings)
    logging.root.handlers.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    try:
        if isinstance(path, str):
            sys.argv, sys.modules["__main__"] = ["-", *arguments], types.ModuleType("__main__")
            exec(compile(path, "<stdin>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent)]
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Torchrun(Script):
    """The agent of torchrun and its ranks, each a process, but forks: what the command reads, starts and restarts."""

    def __init__(self, *arguments: object) -> None:
        importlib.import_module("torch._dynamo")  # The first optimizer of a process imports it.
        self._files = [tempfile.TemporaryFile("w+") for _ in ("out", "err")]  # noqa: SIM115
        Child.__init__(self, _agent, [str(each) for each in arguments], [file.fileno() for file in self._files])


def _agent(arguments: list[str], streams: list[int]) -> None:
    """Be the process of ``torchrun ARGUMENTS``."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    config, _, command = run.config_from_args(run.parse_args(arguments))
    config.start_method = "fork"
    elastic_launch(config, _rank)(*command[command.index("-u") + 1 :])
    sys.stderr.flush()


def _rank(script: str, *arguments: str) -> None:
    """Be one of its ranks."""
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
