"""SilentFaultGuardAddon with every engine: the run is that without it, and a fault on one rank is found on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.engines import ENGINES, Task, build, data, net, weights
from zae import SilentFaultError
from zae.addons import GradientAccumulationAddon, SilentFaultGuardAddon

DEFAULT = ("fsdp",)
NO_DROPOUT = ("tensor", "2-D")  # Where it is refused in a divided activation.
TOGETHER = ("fsdp", "hsdp", "2-D")  # Gradients are summed while they are computed.


class Faulty(Task):
    """On the last rank the gradients are others in the second computation of step 2."""

    def train_step(self, batch: Any) -> Any:
        out = super().train_step(batch)
        if (self.progress_checker.step, self.current_run.computation, self.rank) == (1, 2, self.world_size - 1):
            out["loss"].register_hook(lambda gradient: gradient + 1e-6)
        return out


def made(name: str, *add_ons: Any, task: Any = Task, **options: Any) -> Any:
    dropout = {} if name in NO_DROPOUT else {"dropout": 0.2}
    given = {"gradient_accumulation_steps": 2, "model": net(**dropout), **options}
    return build(ENGINES[name], GradientAccumulationAddon, *add_ons, task=task, **given)


def is_neutral(name: str) -> None:
    engine = ENGINES[name]
    assert dist.get_world_size() == engine.world
    ends = []
    for options in ({"fault_check_every": 2}, {}):
        trainer = made(name, *([SilentFaultGuardAddon] if options else []), gradient_clip=0.05, **options)
        trainer.run(2, data(12 * engine.shares + 1))
        ends.append((weights(trainer), float(trainer.grad_norm), torch.get_rng_state()))
        if options:
            assert trainer.fault_checks == trainer.progress_checker.step // 2 >= 2
            assert trainer.faults == []
    assert all(torch.equal(value, ends[1][0][key]) for key, value in ends[0][0].items())
    assert ends[0][1] == ends[1][1]
    assert torch.equal(ends[0][2], ends[1][2])


def is_found(name: str) -> None:
    engine = ENGINES[name]
    trainer = made(name, SilentFaultGuardAddon, task=Faulty, fault_check_every=2)
    with pytest.raises(SilentFaultError, match=r"step 2: two computations of its gradients differ in the"):
        trainer.run(1, data(16 * engine.shares))
    assert trainer.progress_checker.step == 1
    found = trainer.gather([(each["step"], each["where"], each["rank"]) for each in trainer.faults])
    assert all(each == found[0] for each in found)
    if name in TOGETHER:
        assert found[0] == [(2, "averaged gradient", None)]
    else:
        assert (2, "gradient", engine.world - 1) in found[0]
    if name in ("ddp", "accelerate"):
        assert found[0] == [(2, "gradient", 1)]


def marked(names: Any) -> list[Any]:
    return [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", marked(ENGINES))
def test_a_run_that_is_checked_is_the_run_that_is_not(name: str, crews: Any) -> None:
    """Weights, gradient norm and random streams, bitwise, in windows with dropout and a short end of the epoch."""
    crews(ENGINES[name].world).call(is_neutral, name)


@pytest.mark.parametrize("name", marked(ENGINES))
def test_a_fault_on_one_rank_is_found_on_all(name: str, crews: Any) -> None:
    """And named where gradients are on a rank alone before they are summed."""
    crews(ENGINES[name].world).call(is_found, name)
