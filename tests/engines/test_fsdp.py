"""What FSDPAddon alone promises: which modules are blocks, and which models it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kit.engines import F64, Net, Task, data, net, sgd
from kit.ranks import on_ranks
from zae import ConfigError
from zae.addons import FSDPAddon


def trainer_of(model: nn.Module, task: type[Task] = Task, **options: object) -> Task:
    return task.add_on(FSDPAddon)(model, "cpu", **{"optimizer": sgd, "log_bar": False, **options})


def test_a_star_is_one_part_of_a_name():
    """ "blocks.*" chooses the blocks and not what they contain; a list of modules is refused."""
    assert list(trainer_of(Net(), fsdp_blocks=["blocks.*"]).blocks()) == ["blocks.0", "blocks.1"]
    assert list(trainer_of(Net(), fsdp_blocks="blocks.*.up").blocks()) == ["blocks.0.up", "blocks.1.up"]
    for chosen in ("blocks", "block?", nn.ModuleList, lambda name, module: name.startswith("blocks")):
        with pytest.raises(ConfigError, match=r"blocks is a ModuleList, .* write fsdp_blocks=\['blocks\.\*'\]"):
            trainer_of(Net(), fsdp_blocks=chosen).blocks()


class Scaled(Task):
    """Scale the loss by a parameter that only the optimizer holds."""

    def train_step(self, batch):
        (outside,) = self.optimizer.param_groups[1]["params"]
        return super().train_step(batch)["loss"] * outside.exp()


@on_ranks(2)
def test_a_parameter_outside_of_the_model_is_that_of_rank_0(world):
    """Without a seed, each process of a launcher makes other numbers."""
    begun, ends = torch.tensor(0.5 * (1 + dist.get_rank()), dtype=F64), []
    for rank in (dist.get_rank(), 0):
        model, outside = net(), nn.Parameter(torch.tensor(0.5 * (1 + rank), dtype=F64))
        optimizer = sgd([{"params": list(model.parameters())}, {"params": [outside]}])
        trainer = trainer_of(model, Scaled, optimizer=optimizer)
        trainer.run(1, data(16))
        assert trainer.world_size == world
        ends.append(outside.detach())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], begun)


@on_ranks(2)
def test_a_compiled_model_is_refused(world):
    """Its blocks would lie within one graph."""
    trainer = trainer_of(torch.compile(net(), backend="eager"))
    with pytest.raises(ConfigError, match="write compile_blocks=True"):
        trainer.run(1, data(16))
    assert trainer.world_size == world
