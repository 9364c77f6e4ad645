"""What the recorder of steps sees: each bit of a weight, the order of samples; and the sitecustomize that is hidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import zae.values.hashes

from resumecheck import hashes, steps, watch
from resumecheck.hashes import fingerprints, read
from resumecheck.runs import write_watcher

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.fixture
def recorder() -> steps.Recorder:
    """A recorder that is not installed."""
    recorder = steps.Recorder.__new__(steps.Recorder)
    recorder.torch, recorder.views = torch, {}
    return recorder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_a_flipped_bit_changes_the_hash(dtype: torch.dtype, count: int, recorder: steps.Recorder) -> None:
    """Of any element, also of the last ones, which fill no word, and of a part of a larger one; also a second time."""
    whole = torch.arange(count + 1).to(dtype)
    for tensor in (whole[:count], whole[1:]):
        before, ordered = read(recorder.sums([tensor])), fingerprints([tensor])
        for index in range(count):
            data = tensor.view(torch.uint8)
            data[index * tensor.element_size()] ^= 1
            assert read(recorder.sums([tensor])) != before
            assert fingerprints([tensor]) != ordered
            data[index * tensor.element_size()] ^= 1
        assert read(recorder.sums([tensor])) == before


def test_the_hash_does_not_depend_on_where_a_tensor_lies(recorder: steps.Recorder) -> None:
    whole = torch.randn(9)
    for tensor in (whole[1:], whole[::2], whole.view(3, 3).t()):
        assert read(recorder.sums([tensor])) == read(recorder.sums([tensor.clone()]))
    assert fingerprints([whole[1:]]) == fingerprints([whole[1:].clone()])


def test_a_change_of_a_part_of_a_large_weight_is_seen(recorder: steps.Recorder) -> None:
    """Wherever it is; of so large a one some blocks are summed."""
    weight, changed = torch.zeros(30_001), 16 << 10
    before = read(recorder.sums([weight]))
    for start in range(0, len(weight), 100):
        part = weight[start : start + changed // 4]
        part += 1
        assert read(recorder.sums([weight])) != before or len(part) < changed // 4
        part -= 1
    assert read(recorder.sums([weight])) == before


def test_the_order_of_samples_counts() -> None:
    """Within a batch as well, also of one that is hashed in several pieces."""
    for count in (8, 200_000):
        batch = torch.arange(count)
        assert fingerprints([batch]) != fingerprints([batch.flip(0)])


def test_a_tensor_that_an_optimizer_has_replaced_is_not_kept(recorder: steps.Recorder) -> None:
    """A state that is made anew in each step would else fill the memory."""
    array = np.zeros(1000)
    tensor, is_alive = torch.from_numpy(array), weakref.ref(array)
    recorder.sums([tensor])
    del array, tensor
    assert is_alive() is None


def run_watched(script: str, own_sitecustomize: str, logs: Path, tmp_path: Path) -> str:
    """Run a script whose watcher hides a sitecustomize of the user; return what they print."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(own_sitecustomize)
    write_watcher(tmp_path / "watch")
    plan = {"folder": str(logs), "work": str(tmp_path), "by": "optimizer", "orders": "", "limit": None}
    plan |= {"writable": [str(tmp_path)], "refusal": str(logs / "refusal.json"), "snapshots": False}
    path = os.pathsep.join([str(tmp_path / "watch"), str(tmp_path / "own")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), watch.PLAN: json.dumps(plan)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_sitecustomize_of_the_user_runs_as_well(tmp_path: Path) -> None:
    assert run_watched("0", "print('mine')", tmp_path, tmp_path) == "mine\n"


LOOKS = "import importlib.util; importlib.util.find_spec('torch')"
IMPORTS = "import torch"
STEP = """
from torch import nn, optim
model = nn.Linear(2, 1)
model(torch.ones(1, 2)).sum().backward()
optim.SGD(model.parameters(), lr=0.1).step()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", [LOOKS, IMPORTS])
@pytest.mark.parametrize("is_in_sitecustomize", [False, True])
def test_steps_are_seen_whoever_looks_for_torch_first(before: str, is_in_sitecustomize: bool, tmp_path: Path) -> None:
    """Many libraries ask whether torch is installed before they import it, and a sitecustomize may import it."""
    logs = tmp_path / "logs"
    logs.mkdir()
    in_sitecustomize, in_script = (before, "") if is_in_sitecustomize else ("", before)
    run_watched(f"{in_script}\nimport torch{STEP}", in_sitecustomize, logs, tmp_path)
    rows = [json.loads(line) for file in logs.iterdir() for line in file.read_text().splitlines()]
    assert [each["n"] for each in rows if each["kind"] == "step"] == [1]


def test_zae_hashes_a_step_in_the_same_way() -> None:
    """Neither needs the other: each has the file."""
    assert Path(zae.values.hashes.__file__).read_text() == Path(hashes.__file__).read_text()
