"""The table of engines, and the tiny task that each of them trains: tests/engines holds every promise for every line.

A new engine is tested by adding a line to `ENGINES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from zae import AddOnBase, Trainer
from zae.addons import (
    AccelerateAddon,
    FSDPAddon,
    MultiGPUAddon,
    PipelineAddon,
    TensorParallelAddon,
)

F64 = torch.float64
VOCABULARY, WIDTH, HEAD = 11, 8, 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.first(inputs)
        heads = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value))
        x = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        inputs = inputs + self.dropout(self.out(x.transpose(1, 2).flatten(2)))
        return inputs + self.down(nn.functional.gelu(self.up(self.second(inputs))))


class Scale(nn.Module):
    """Multiply by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((1,), 0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


class Net(nn.Module):
    """A language model of two blocks, with a buffer."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.scale = Scale()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.scale(self.head(self.norm(x)))


class Task(Trainer):
    """Predict the next token; a row is a sequence."""

    def train_step(self, batch: Any) -> Any:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss}

    def test_step(self, batch: Any) -> Any:
        return {**self.train_step(batch), "rows": batch[0][:, 0].clone()}

    def metric_on_epoch_end(self) -> dict[str, float]:
        if self.mode == "train":
            return {}
        rows = torch.cat(self.log_test["rows"])
        return {"n_rows": len(rows), "ordered": float(torch.arange(1.0, len(rows) + 1) @ rows.float())}


class Counted(Task):
    """The same with the number of its targets."""

    def train_step(self, batch: Any) -> Any:
        return {**super().train_step(batch), "num_targets": batch[0][:, 1:].numel()}

    def test_step(self, batch: Any) -> Any:
        return {**Task.train_step(self, batch), "rows": batch[0][:, 0].clone()}


@dataclass(frozen=True)
class Engine:
    """A line of the table: the add-ons of an engine, its ranks, and what they make of the model."""

    add_ons: tuple[type[AddOnBase], ...]
    world: int = 2
    shares: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    layouts: frozenset[str] = frozenset({"replicated"})
    wrapper: str = "Net"
    is_sampled: bool = False  # Whether the default run has only the first test of it.


STAGES = frozenset({"replicated", "elsewhere"})
SHARDED, MIXED = frozenset({"sharded"}), frozenset({"sharded", "replicated"})
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.out": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}

ENGINES = {
    "ddp": Engine((MultiGPUAddon,), wrapper="Replica"),
    "accelerate": Engine((AccelerateAddon,), wrapper="Replica", is_sampled=True),
    "fsdp": Engine((FSDPAddon,), layouts=SHARDED, wrapper="FSDPNet"),
    "hsdp": Engine((FSDPAddon,), 4, 4, {"mesh": {"replicate": 2, "shard": 2}}, layouts=SHARDED, wrapper="FSDPNet"),
    "tensor": Engine((TensorParallelAddon,), 2, 1, {"tensor_plan": PLAN}, layouts=MIXED),
    "2-D": Engine(
        (FSDPAddon, TensorParallelAddon),
        *(4, 2, {"mesh": {"shard": 2, "tensor": 2}, "tensor_plan": PLAN}),
        layouts=SHARDED,
        wrapper="FSDPNet",
    ),
    "pipeline": Engine(
        (PipelineAddon,), 2, 1, {"split": ["blocks.1"]}, layouts=STAGES, wrapper="StagedModel", is_sampled=True
    ),
    "pipelines": Engine(
        (PipelineAddon,),
        *(4, 2, {"mesh": {"replicate": 2, "pipeline": 2}, "pipeline_schedule": "GPipe"}),
        layouts=STAGES,
        wrapper="StagedModel",
    ),
}


def layout(parameter: torch.Tensor) -> str:
    """Return how the ranks hold a parameter."""
    return "sharded" if isinstance(parameter, DTensor) else "elsewhere" if parameter.is_meta else "replicated"


def net(dtype: torch.dtype = F64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def data(rows: int = 48, batch_size: int = 4, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    tokens = torch.randint(VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2) if shuffle else None
    return DataLoader(TensorDataset(tokens), batch_size, shuffle=shuffle, generator=generator, **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build(engine: Engine | None, *add_ons: type[AddOnBase], task: type[Trainer] = Task, **options: Any) -> Any:
    """Return a trainer with the add-ons of an engine, or of one process."""
    own = {} if engine is None else engine.options
    given = {"optimizer": adamw, "log_bar": False, "seed": 0, **own, **options}
    cls = task.add_on(*(() if engine is None else engine.add_ons), *add_ons)
    return cls(given.pop("model", None) or net(), given.pop("device", "cpu"), **given)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights; all ranks call it."""
    return {name: value.detach().clone() for name, value in trainer.model_state().items()}


def distance(trainer: Any, other: Any, without: str = "key.bias") -> float:
    """Return the largest difference of a weight; a key bias has no gradient but rounding, and is left out."""
    own, others = weights(trainer), weights(other)
    assert own.keys() == others.keys()
    return max(float((own[name] - others[name]).abs().max()) for name in own if not name.endswith(without))
