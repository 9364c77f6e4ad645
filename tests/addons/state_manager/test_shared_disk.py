"""Ranks whose disks are not shared are found as a run begins, before anything is trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kit.engines import ENGINES, build, data
from kit.ranks import each_rank
from zae import CheckpointError
from zae.addons import StateManagerAddon

WORLD = 2


def start(engine: str, folder: Path, is_shared: bool, **options: Any) -> tuple[int, str]:
    """Return the steps of a run on this rank, and what was said or raised."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zae").addHandler(handler)
    own = folder if is_shared else folder / f"disk-{dist.get_rank()}"
    trainer = build(ENGINES[engine], StateManagerAddon, save_path=own / "run", timeout=20.0, **options)
    try:
        trainer.run(1, data(16, 4))
    except CheckpointError as error:
        texts.append(str(error))
    left = [*own.rglob(".ranks-*")]
    assert not left
    return trainer.progress_checker.step, " ".join(texts)


def test_ranks_that_write_to_disks_of_their_own_are_refused_before_a_step(tmp_path: Path) -> None:
    for steps, text in each_rank(WORLD, lambda: start("fsdp", tmp_path, False, save_format="sharded")):
        assert steps == 0
        assert "of 2 does not see what rank 0" in text
        assert "save_format='safetensors', which rank 0 writes" in text


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_folder_that_only_rank_0_writes_to_is_named_and_not_refused(engine: str, tmp_path: Path) -> None:
    (steps, text), (other_steps, other_text) = each_rank(WORLD, lambda: start(engine, tmp_path, False))
    assert steps == other_steps == 2
    assert "does not see what rank 0" in text
    assert "does not see" not in other_text


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("options", [{}, {"save_format": "sharded"}], ids=str)
def test_a_shared_disk_is_told_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    for steps, text in each_rank(WORLD, lambda: start("fsdp", tmp_path, True, **options)):
        assert steps == 2
        assert "does not see" not in text
