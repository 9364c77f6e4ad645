"""One thread, so that "bitwise" means the same on every machine; and zae.addons where the checkout hides it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import zae

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("zae.addons") is None:
    zae.__path__.append(str(ROOT))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quiet_folder(tmp_path, monkeypatch):
    """Run every test in a folder of its own: what writes to the working folder is seen, and harms nobody."""
    monkeypatch.chdir(tmp_path)
