"""Make the mistakes of mistakes*.py, and read what a user sees of each."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import torch

import kit.mistakes_in_engines
import kit.mistakes_in_runs
import kit.mistakes_in_states
import kit.mistakes_of_newcomers  # noqa: F401
from kit.mistakes import CATALOGUE


def meet(name: str) -> Exception:
    """Make a mistake in an empty folder, and return what it raised, or the warning of its class."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            CATALOGUE[name].make()
        except Exception as error:
            return error
        finally:
            os.chdir(before)
    of_names = [each.message for each in warned if "is not called by the loop" in str(each.message)]
    if of_names and isinstance(of_names[0], Exception):
        return of_names[0]
    raise AssertionError(f"{name} passed without an error")


def text_of(error: Exception) -> str:
    """The message and the notes that a user reads."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
