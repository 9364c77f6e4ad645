"""Wait until the process that checks is gone, and end what it left: ``python -m resumecheck.reaper FOLDER``."""

from __future__ import annotations

import os
import shutil
import sys

from .runs import end_processes


def _main(home: str) -> None:
    sys.stdin.buffer.read()  # Its end is closed with the process, however that ends.
    if not os.path.exists(home):
        return
    end_processes(home)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.argv[1])
