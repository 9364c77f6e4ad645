"""The texts of mistakes that people make, as golden/errors.txt keeps them; the mistakes are in mistakes*.py.

``python tests/kit/error_catalogue.py`` writes that file again: read the difference before it is committed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # When it is run as a script.

import kit.mistakes_in_engines
import kit.mistakes_in_runs
import kit.mistakes_in_states
import kit.mistakes_of_newcomers  # noqa: F401
from kit.mistakes import CATALOGUE
from zae import ZaeError

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "errors.txt"


def meet(name: str) -> Exception:
    """Make a mistake in an empty folder, and return what it raised: a warning, or nothing, is not enough."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            CATALOGUE[name]()
        except Exception as error:
            return error
        finally:
            os.chdir(before)
    raise AssertionError(f"{name} passed without an error")


def text_of(error: Exception) -> str:
    """What a user reads, without what changes from machine to machine; of other packages' errors, our notes alone."""
    parents = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
    kind = type(error).__name__ if not isinstance(error, ZaeError) else f"{type(error).__name__} ({parents[0]})"
    message = str(error) if isinstance(error, ZaeError) else "(the message of torch)"
    notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
    text = "\n".join([f"{kind}: {message}", *notes])
    text = re.sub(r"/[^ :'\"]*/tmp\w+", "<folder>", text)
    text = re.sub(r"(mistakes\w*\.py, line )\d+", r"\1...", text)
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def frames_of(error: Exception) -> int:
    """How many frames a user sees, from the line in their script on."""
    frames = traceback.extract_tb(error.__traceback__)
    return sum(1 for frame in frames if frame.name != "meet")


def all_texts() -> str:
    """The golden file."""
    texts = {name: text_of(meet(name)) for name in CATALOGUE}
    return "\n\n".join(f"== {name}\n{text}" for name, text in texts.items()) + "\n"


if __name__ == "__main__":
    with contextlib.redirect_stderr(sys.stdout):
        GOLDEN.write_text(all_texts())
