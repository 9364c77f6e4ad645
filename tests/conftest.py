"""One thread, so that "bitwise" means the same on every machine, and every test in its own folder."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import types
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # A database takes seconds to create.
# In memory, where there is room: thousands of checkpoints are synced to the disk, and no test asks how fast that is.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
    # What inductor has compiled stays on the disk, for the next run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    tempfile.tempdir = "/dev/shm"

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))

import pytest
import torch
from torch._dynamo import guards
from xdist.scheduler import LoadFileScheduling

from kit import faults, huge_pages, sample

torch.set_num_threads(1)
# Its grammars take jsonschema, which does without, 3 s: Neptune imports that, and nbformat.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
gc.set_threshold(50_000, 20, 50)  # A tenth of the time went into collections that found next to nothing.
# What earlier tests left to the collector has threads (a process group's, say) that a fork does not inherit: to free it
# there would wait for them for ever, or abort.
os.register_at_fork(after_in_child=gc.freeze)
# From Python 3.14 on the workers of a loader come from a server, and a fork is not the parent of the one there was.
os.register_at_fork(after_in_child=lambda: forkserver._forkserver.__init__())
# Torch measures the guards of each graph with an empty cache of the processor, which takes as long as to trace it.
guards.profile_guard_manager = lambda *_: 0.0
# Torch notes the stack of each seed for devices that are not there, which takes longer than the seed.
for module in (torch.cuda, torch.mtia, torch.xpu):
    module.traceback = types.SimpleNamespace(format_stack=list)
# A shell that starts this in the background lets it ignore Ctrl-C, and with it what it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FOLDERS_OF_ONE_WORKER = ("tests/engines/",)
"""Their files share ranks that stay: each new rank takes a second for what torch imports and caches in it."""

LONGEST = ("table", "emulated_cuda", "kinds", "composition", "distributed", "resume", "docs", "examples", "compile",
           "testing", "crash", "stopped_ranks", "notebook", "between_runs", "owners_and_kinds", "user_state", "package",
           "huggingface", "continue_from", "mpu_resume", "failing_stores", "mpu", "loader_state", "search",
           "hyperparameter_search", "state_manager", "failed_runs", "stop_signals", "wandb_logger", "hf_saving",
           "shared_rows", "mpu_data", "random_streams", "fault_signals", "remote")  # fmt: skip
"""The files that take the most seconds, of a processor or of waiting, the longest first."""


def pytest_xdist_make_scheduler(config, log):
    """Give a worker a file at a time, or a folder whose files share more than that."""

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return next((each for each in FOLDERS_OF_ONE_WORKER if nodeid.startswith(each)), nodeid.partition("::")[0])

    return ByFileOrFolder(config, log)


ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "benchmarks", "docs", "examples", "tests")
CACHES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "zae.egg-info"}
found_before = pytest.StashKey[set[Path]]()


def look():
    """List what lies in the checkout, but for caches: in its root, and in folders whose scripts tests run."""
    return {path for folder in FOLDERS for path in (ROOT / folder).iterdir() if path.name not in CACHES}


def pytest_sessionstart(session):
    """Note what lies in the checkout."""
    session.config.stash[found_before] = look()


def pytest_sessionfinish(session):
    """Fail a run whose tests left something in the checkout."""
    left = sorted(str(path.relative_to(ROOT)) for path in look() - session.config.stash[found_before])
    if left and not hasattr(session.config, "workerinput"):
        session.config.get_terminal_writer().line(f"\nthe tests left in the checkout: {', '.join(left)}", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure():
    """Remove the folder of Trackio, which is read as it is imported."""
    shutil.rmtree(os.environ["TRACKIO_DIR"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # Before pytest looks at the markers.
def pytest_collection_modifyitems(items):
    """Mark what samples leave out, and begin with the folders of one worker and the longest files.

    No worker is left with one of them at the end.
    """
    sample.mark_the_rest(items)
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(FOLDERS_OF_ONE_WORKER),
            places.get(item.path.stem, len(places)),
        )
    )


@pytest.fixture(autouse=True)
def _signals_left_alone():
    """Fail the test that leaves another handler of a signal behind, not one that comes long after it."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture(autouse=True, scope="session")
def _quiet_session(tmp_path_factory):
    """Leave the checkout: fixtures of a file, and what ends late, write to the working folder too."""
    with contextlib.chdir(tmp_path_factory.mktemp("session")):
        yield


@pytest.fixture(autouse=True)
def _quiet_folder(tmp_path, monkeypatch):
    """Run every test in its own folder: what writes to the working folder is seen, and harms nobody."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder():
    """A folder in memory."""
    made = faults.memory_folder()
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True, scope="module")
def _collector_looks_at_this_file_alone():
    """Collect what this file makes alone: with torch loaded, most of the time goes into objects that stay.

    Forks of this process get cheap.
    """
    gc.collect()
    gc.freeze()
    huge_pages.merge_pages()
