"""plan() tells the steps and batches of the ranks before they are started, and refuses what they would refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engines import engines
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import ENGINES, Task, build
from kit.ranks import each_rank
from zae import ConfigError
from zae.addons import GradientAccumulationAddon

ROWS, WIDTH = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 1.0


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
WINDOW = {"gradient_accumulation_steps": 2}
Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def data(batch_size: int, rows: int) -> DataLoader[Any]:
    tokens = torch.randint(16, (rows, 3), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size)


def make(case: Case, devices: Any = "cpu") -> Any:
    name, add_ons, options = case
    return build(ENGINES[name], *add_ons, task=Task, device=devices, **{"model": Net(), **options})


@pytest.mark.exhaustive
@engines(["ddp", "fsdp", "tensor", "2-D"])
def test_the_steps_are_those_of_the_ranks(name: str) -> None:
    """The plan is made before the ranks are there: steps of each rank, and samples of all shares of the data."""
    engine = ENGINES[name]
    case: Case = (name, (GradientAccumulationAddon,), {**WINDOW, **engine.options})
    case[2].update({"tensor_plan": PLAN} if "tensor_plan" in engine.options else {})
    many = (ROWS, 2 * engine.world + 1)
    found = each_rank(engine.world, run, case, many)
    for index, rows in enumerate(many):
        plan = make(case, ["cpu"] * engine.world).plan(2, data(2, rows), data(2, 3))
        assert (plan.world_size, plan.dp_world_size) == (engine.world, engine.shares)
        assert plan.effective_batch_size == 2 * 2 * engine.shares
        assert plan.leaves_out == (rows % (2 * engine.shares) in range(1, engine.shares))
        counts = (plan.batches_per_epoch, plan.steps_per_epoch)
        assert [of_rank[index] for of_rank in found] == [(counts, plan.steps, plan.epoch_ends)] * engine.world


REFUSED: dict[str, tuple[str, Any, str]] = {
    "lazy copy": ("ddp", {"model": lambda: nn.LazyLinear(2)}, "the model is lazy"),
    "table": ("ddp", {"model": lambda: nn.Embedding(9, 2, max_norm=1.0)}, "Embedding has max_norm"),
    "lazy": ("fsdp", {"model": lambda: nn.LazyLinear(2)}, "the model is lazy"),
    "compiled": ("fsdp", {"model": lambda: torch.compile(Net(), backend="eager")}, "write compile_blocks=True"),
    "blocks": ("fsdp", {"fsdp_blocks": ["Blok"]}, "no module of Net is 'Blok'"),
    "mesh": ("fsdp", {"mesh": {"shard": 3}}, "is of 3 ranks, and this run has 2"),
    "no ranks": ("2-D", {"tensor_plan": PLAN, "mesh": {"shard": 2, "tensor": 1}}, "leaves 1 rank for each layer"),
    "lazy layer": ("tensor", {"model": lambda: nn.LazyLinear(2), "tensor_plan": {}}, "the model is lazy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ranks_would_refuse_is_refused(name: str) -> None:
    """The plan raises it before a rank is started."""
    engine, options, message = REFUSED[name]
    made = make((engine, (), options), ["cpu", "cpu"])
    with pytest.raises(ConfigError, match=message):
        made.plan(1, data(2, 5))


def run(case: Case, many: tuple[int, ...]) -> list[Any]:
    """Return for each number of rows what a rank knows before the run, and after it."""
    made = []
    for rows in many:
        trainer = make(case)
        plan = trainer.plan(2, data(2, rows))
        trainer.run(2, data(2, rows), data(2, 3))
        ends = [(row["epoch"], row["step"]) for row in trainer.train_history]
        made.append(((plan.batches_per_epoch, plan.steps_per_epoch), trainer.progress_checker.step, ends))
    return made
