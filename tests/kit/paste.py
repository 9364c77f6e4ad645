"""Runs the python blocks of a page as one file: in a process and a folder of its own, as a reader who pastes them."""

from __future__ import annotations

import gc
import os
import re
import runpy
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

BLOCK = re.compile(r"^(?P<mark> *<!-- not run: .+ -->\n+)?^ *```python\n(?P<code>.*?)^ *```$", re.M | re.S)


def paste(text: str) -> str:
    """Return the python blocks of a page below each other, without those that a comment says are not run."""
    found = [block for block in BLOCK.finditer(text) if not block["mark"]]
    return "\n".join(textwrap.dedent(block["code"]) for block in found)


class Files:
    """A process that has loaded torch and zae, and forks for each file that it runs."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, code: str, folder: Path) -> tuple[int, str]:
        """Run code as a file whose folder is empty, and return its exit status and what it wrote to both streams."""
        (folder / "empty").mkdir()
        (folder / "page.py").write_text(code, encoding="utf-8")
        print(folder, file=self.server.stdin, flush=True)
        status = int(self.server.stdout.readline())
        return status, (folder / "printed").read_text(encoding="utf-8")

    def close(self) -> None:
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()


def _run_file(folder: Path) -> None:
    """Run one file in this process, which then ends."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(new, old)
    os.chdir(folder / "empty")
    sys.argv, sys.path[0] = ["page.py"], str(folder)
    runpy.run_path(str(folder / "page.py"), run_name="__main__")


def _serve() -> None:
    """Run the file of each folder that the standard input names, and print its exit status."""
    # The first optimizer of a process takes a part of _dynamo: that is loaded once, instead of in each fork.
    for name in ("sklearn.datasets", "torch._dynamo", "zae.addons"):
        import_module(name)
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run_file(Path(line.strip()))
            return
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
