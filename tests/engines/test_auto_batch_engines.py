"""AutoBatchAddon with every engine: batches that are computed in parts leave the weights of the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from kit.engines import ENGINES, Counted, Task, build, data, distance, net, sgd
from zae.addons import AutoBatchAddon, GradientAccumulationAddon, PipelineAddon

NAMES = [name for name, engine in ENGINES.items() if PipelineAddon not in engine.add_ons]  # It is refused with those.
DEFAULT = ("ddp",)
BOUND = 1e-12


def is_whole(name: str, task: Any) -> None:
    engine = ENGINES[name]
    assert dist.get_world_size() == engine.world
    trainers = []
    for options in ({"micro_batch_size": 3}, {}):
        add_ons = (GradientAccumulationAddon, *([AutoBatchAddon] if options else []))
        given = {"optimizer": sgd, "model": net(), "gradient_accumulation_steps": 2, **options}
        trainer = build(engine, *add_ons, task=task, **given)
        trainer.run(2, data(12 * engine.shares + 1))
        trainers.append(trainer)
    assert trainers[0].progress_checker.step == trainers[1].progress_checker.step >= 2
    assert distance(*trainers) <= BOUND


@pytest.mark.parametrize("task", [Task, pytest.param(Counted, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive)
                                  for name in NAMES])  # fmt: skip
def test_parts_of_batches_leave_the_weights_of_the_whole(name: str, task: Any, crews: Any) -> None:
    """In windows of two batches, with parts of different sizes, and a last batch of one sample."""
    crews(ENGINES[name].world).call(is_whole, name, task)
