"""Stored checkpoints of each present format load to the same state, and their runs continue to the end.

No figure of training is compared with a stored one: those depend on the processor.
"""

from __future__ import annotations

import copy
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import frozen
from kit.rank_tasks import forks
from zae.__main__ import main
from zae.checkpoint.manifest import FORMAT, ROWS_FORMAT, SHARDED_FORMAT, seal
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.weights import load_weights
from zae.errors import CheckpointMismatch


def differences(saved: Any, present: Any, path: str = "state") -> list[str]:
    """Name what a saved state holds and the present one does not, to the last bit; there may be more in that."""
    if isinstance(saved, dict) and isinstance(present, dict):
        missing = [f"{path}[{key!r}] is missing" for key in saved if key not in present]
        both = [key for key in saved if key in present]
        return missing + [text for key in both for text in differences(saved[key], present[key], f"{path}[{key!r}]")]
    if isinstance(saved, (list, tuple)) and isinstance(present, (list, tuple)) and len(saved) == len(present):
        parts = enumerate(zip(saved, present))
        return [text for i, (a, b) in parts for text in differences(a, b, f"{path}[{i}]")]
    if isinstance(saved, torch.Tensor) and isinstance(present, torch.Tensor):
        return [] if torch.equal(saved, present) and saved.dtype == present.dtype else [f"{path}: other numbers"]
    return (
        []
        if saved == present or (saved != saved and present != present)
        else [f"{path}: {saved!r:.60}, now {present!r:.60}"]
    )


@pytest.mark.parametrize("name", [name for name, case in frozen.CASES.items() if case.ranks == 1])
def test_frozen_checkpoint_loads_to_what_it_was(name: str, tmp_path: Path) -> None:
    """The state is read back entry for entry; a run from it ends as one from a copy that is saved now."""
    end = frozen.unpack(name, tmp_path)
    place = tmp_path / "save" / f"step-{frozen.CASES[name].step:08d}"
    _, model, rest = load_checkpoint(place)
    saved = {**rest, "model": model}
    loaded, _, _ = frozen.CASES[name].build(tmp_path / "copy")
    loaded.load_state_dict(copy.deepcopy(saved))
    del saved["StateManagerAddon"]["scores"]  # Of the checkpoints beside it, which are not here.
    saved["records"].pop("settings", None)  # What the run was given is written in another way since.
    if "EMAAddon" in saved:  # The entry has another name since.
        saved["EMAAddon"]["averaged_epochs"] = saved["EMAAddon"].pop("averaged", 0)
    assert differences(saved, loaded.state_dict()) == []
    loaded.save_state()

    runs = []
    for folder in (tmp_path, tmp_path / "copy"):
        trainer, loader, valid = frozen.CASES[name].build(folder)
        trainer.run(frozen.EPOCHS, loader, valid)
        runs.append(trainer)
    resumed, copied = runs
    assert frozen.end_of(resumed) == frozen.end_of(copied) == end
    first = saved["records"]["train_history"]
    assert resumed.metrics["train_metrics_history"][: len(first)] == first
    assert resumed.metrics == copied.metrics
    assert resumed.log_history == copied.log_history
    assert resumed.log_history[: len(saved["records"]["log_history"])] == saved["records"]["log_history"]


@pytest.mark.parametrize("name", [name for name, case in frozen.CASES.items() if case.ranks == 2])
def test_frozen_checkpoint_of_two_ranks(name: str, tmp_path: Path) -> None:
    """Two processes, each of which has saved its parts, continue to the end of the run."""
    end = frozen.unpack(name, tmp_path)
    _, saved, rest = load_checkpoint(tmp_path / "save" / f"step-{frozen.CASES[name].step:08d}")
    trainer, loader, valid = frozen.CASES[name].build(tmp_path)
    with forks():
        trainer.run(frozen.EPOCHS, loader, valid)
    assert trainer.devices == [torch.device("cpu")] * 2
    assert frozen.end_of(trainer) == end
    first = rest["records"]["train_history"]
    assert trainer.metrics["train_metrics_history"][: len(first)] == first
    assert all(torch.isfinite(value).all() for value in trainer.model_state().values())
    assert not any(torch.equal(value, saved[key]) for key, value in trainer.model_state().items())


def test_frozen_shards_are_read_without_ranks(tmp_path: Path) -> None:
    """doctor and consolidate, and a state dict of one process, with whole weights, optimizer state and average."""
    frozen.unpack("two-shards", tmp_path)
    place = tmp_path / "save" / f"step-{frozen.CASES['two-shards'].step:08d}"
    assert main(["doctor", str(tmp_path / "save")]) == 0
    assert main(["consolidate", str(place), str(tmp_path / "plain.safetensors")]) == 0
    manifest, model, state = load_checkpoint(place)
    assert (manifest["model_format"], manifest["world_size"]) == ("sharded", 2)
    weights = load_weights(tmp_path / "plain.safetensors")
    assert weights.keys() == model.keys() == state["EMAAddon"]["average"].keys()
    assert all(torch.equal(weights[name], value) for name, value in model.items())
    slots = [each["exp_avg"] for _, each in sorted(state["optimizer"]["0"]["state"].items())]
    assert [each.shape for each in slots] == [each.shape for each in model.values()]


def test_each_present_format_is_stored() -> None:
    manifests = [json.loads(zipfile.ZipFile(path).read("manifest.json")) for path in frozen.FOLDER.glob("*.zip")]
    assert {content["format"] for content in manifests} == {FORMAT, SHARDED_FORMAT, ROWS_FORMAT}
    assert {content["model_format"] for content in manifests} == {"safetensors", "ckpt", "sharded"}


def test_a_newer_format_is_refused_in_words(tmp_path: Path) -> None:
    frozen.unpack("ckpt", tmp_path)
    place = tmp_path / "save" / f"step-{frozen.CASES['ckpt'].step:08d}" / "manifest.json"
    place.write_bytes(seal({**json.loads(place.read_text()), "format": 7, "zae": "9.1"}))
    trainer, _, _ = frozen.CASES["ckpt"].build(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"written by zae '9\.1', format 7; this version reads up to 3"):
        trainer.setup()
