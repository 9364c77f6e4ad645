"""plan() tells the state of a rank, within a tenth of what the ranks then hold, and their steps and batches."""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_engines import engines
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import ENGINES, Task, build
from kit.ranks import each_rank
from zae import ConfigError
from zae.addons import EMAAddon, GradientAccumulationAddon, GradientCheckpointingAddon

ROWS, WIDTH, VOCABULARY = 8, 256, 1000
OF_RANK = 4  # Rows that make two windows: in the first one the optimizer has no state yet.
SMALL = 8
MMAP_THRESHOLD = -3  # Of mallopt: larger tensors get memory of their own, which is given back when they are freed.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model whose memory is that of its parameters, as its batches are tiny."""

    def __init__(
        self, width: int = WIDTH, blocks: int = 4, vocabulary: int = VOCABULARY, is_tied: int = 0, frozen: int = 0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)
        if is_tied:
            self.head.weight = self.embed.weight
        for each in self.blocks[:frozen]:
            each.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 1.0


class Measured(Task):
    """Notes the memory of this process when a step has its gradients, and the optimizer its state."""

    resident = 0

    def should_step(self, outputs: Any) -> bool:
        if self.progress_checker.step:
            Measured.resident = max(Measured.resident, resident("VmRSS"))
        return super().should_step(outputs)


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WINDOW = {"gradient_accumulation_steps": 2}
Case = tuple[str | None, tuple[Any, ...], dict[str, Any], dict[str, int]]
CASES: dict[int, list[Case]] = {  # By the number of ranks.
    1: [
        (None, (), {}, {}),
        (None, (EMAAddon,), {"optimizer": "momentum"}, {}),
        (None, (), {"optimizer": "sgd"}, {}),
    ],
    2: [
        ("ddp", (), {}, {}),
        ("fsdp", (GradientAccumulationAddon,), {**WINDOW, "mp_policy": MIXED}, {}),
    ],
    4: [("2-D", (), {"tensor_plan": PLAN}, {})],
}
MORE: dict[int, list[Case]] = {
    1: [
        *((None, (), {"optimizer": each}, {}) for each in OPTIMIZERS),
        (None, (), {}, {"vocabulary": 8000}),  # Nearly all is one parameter.
    ],
    2: [
        ("fsdp", (), {}, {}),
        ("tensor", (), {"tensor_plan": PLAN}, {}),
        ("pipeline", (), {"split": ["blocks.2"]}, {}),
        ("ddp", (GradientAccumulationAddon,), {**WINDOW, "optimizer": "momentum"}, {}),
        ("fsdp", (), {"optimizer": "sgd"}, {}),
        ("fsdp", (), {"reshard_after_forward": False}, {}),
        ("fsdp", (GradientAccumulationAddon, EMAAddon), WINDOW, {}),
        ("fsdp", (), {}, {"blocks": 2}),
        ("fsdp", (), {}, {"blocks": 1}),
        ("fsdp", (), {}, {"vocabulary": 8000}),
        ("fsdp", (), {"fsdp_blocks": ["blocks.0", "embed"]}, {}),
        ("fsdp", (), {"meta_init": True}, {}),
        ("fsdp", (), {"mp_policy": HALF}, {}),
        ("fsdp", (), {"mp_policy": MIXED, "reshard_after_forward": False}, {}),
        ("fsdp", (GradientAccumulationAddon,), {**WINDOW, "mp_policy": HALF}, {}),
        ("fsdp", (), {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, {}),
        ("fsdp", (GradientCheckpointingAddon,), {}, {}),
        ("fsdp", (GradientCheckpointingAddon,), {"mp_policy": HALF, "reshard_after_forward": False}, {}),
        ("fsdp", (), {"optimizer": "momentum"}, {"is_tied": 1}),
        ("fsdp", (), {"mp_policy": HALF}, {"is_tied": 1}),
        ("fsdp", (), {}, {"frozen": 2}),
        ("fsdp", (), {"reshard_after_forward": False}, {"frozen": 2}),
        ("ddp", (), {}, {"is_tied": 1}),
        ("ddp", (), {}, {"frozen": 2}),
        ("tensor", (), {"tensor_plan": PLAN, "optimizer": "amsgrad"}, {"frozen": 2}),
    ],
    4: [
        ("fsdp", (), {}, {}),
        ("hsdp", (), {}, {}),
        ("hsdp", (GradientAccumulationAddon,), {**WINDOW, "mp_policy": MIXED}, {}),
        ("hsdp", (), {"reshard_after_forward": False, "optimizer": "momentum"}, {}),
        ("hsdp", (), {}, {"frozen": 2}),
        *(
            ("2-D", add_ons, {"tensor_plan": PLAN, "meta_init": True, **options}, own)
            for add_ons, options, own in (
                ((), {}, {}),
                ((), {"mp_policy": HALF}, {}),
                ((), {"reshard_after_forward": False}, {}),
                ((GradientAccumulationAddon,), WINDOW, {}),
                ((GradientCheckpointingAddon,), {"optimizer": "momentum"}, {"frozen": 2}),
            )
        ),
    ],
}


def data(batch_size: int = 1, rows: int = ROWS) -> DataLoader[Any]:
    tokens = torch.randint(SMALL, (rows, 3), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size)


def make(case: Any, devices: Any = "cpu", **sizes: int) -> Any:
    name, add_ons, options, own = case
    options = {**options, "optimizer": OPTIMIZERS[options.get("optimizer", "adamw")]}
    make_model = functools.partial(Net, **{**own, **sizes})
    options.setdefault("model", make_model if options.get("meta_init") else make_model())
    engine = ENGINES[name] if name else None
    return build(engine, *add_ons, task=Measured, device=devices, **options)


def loader_of(case: Case, world: int) -> DataLoader[Any]:
    """Return batches of one row for each rank; a pipeline divides its batch among them."""
    is_pipeline = (case[0] or "").startswith("pipeline")
    return data(world if is_pipeline else 1, OF_RANK * world)


def resident(field: str) -> int:
    """Return the bytes of this process that are in memory, by the name of the entry."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def measure(cases: Any) -> list[int]:
    """Return how much more memory this rank holds when a step has its gradients, for each case."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(MMAP_THRESHOLD, 1 << 15) == 1
    grown = []
    for case in cases:
        loader = loader_of(case, dist.get_world_size())
        first = make(case)
        planned = first.plan(1, loader).steps
        first.run(1, loader)  # It loads and compiles kernels, which takes 10 MB for bfloat16 on a CPU.
        del first
        gc.collect()
        end = libc.sbrk(0)
        while libc.sbrk(0) == end:  # Until the heap has no room for a tensor, whose memory would be counted already.
            libc.malloc(1 << 14)
        Measured.resident, before = 0, resident("VmRSS")
        trainer = make(case)
        trainer.run(1, loader)
        grown.append(Measured.resident - before)
        assert trainer.progress_checker.step == planned
        del trainer
    return grown


def check(world: int, cases: list[Case], measure: Any = measure) -> None:
    plans = [make(case, ["cpu"] * world).plan(1, loader_of(case, world)) for case in cases]
    found = each_rank(world, measure, cases, timeout=120)
    rows = [
        (case, plan.memory.total, max(of_rank[index] for of_rank in found))
        for index, (case, plan) in enumerate(zip(cases, plans, strict=True))
    ]
    # What is freed is not all given back: of a small state that is more than a tenth.
    assert [row for row in rows if abs(row[1] - row[2]) > max(row[2] / 10, 1 << 20)] == []


@pytest.mark.sample(count=1)
@engines(["ddp", "fsdp", "tensor", "2-D"])
def test_the_steps_are_those_of_the_ranks(name: str) -> None:
    """The plan is made before the ranks are there: steps of each rank, and samples of all shares of the data."""
    engine = ENGINES[name]
    case: Case = (name, (GradientAccumulationAddon,), {**WINDOW, **engine.options}, {})
    case[2].update({"tensor_plan": PLAN} if "tensor_plan" in engine.options else {})
    many = (ROWS, 2 * engine.world + 1)
    found = each_rank(engine.world, run, case, many)
    for index, rows in enumerate(many):
        plan = make(case, ["cpu"] * engine.world, width=SMALL).plan(2, data(2, rows), data(2, 3))
        assert (plan.world_size, plan.dp_world_size) == (engine.world, engine.shares)
        assert plan.effective_batch_size == 2 * 2 * engine.shares
        assert plan.leaves_out == (rows % (2 * engine.shares) in range(1, engine.shares))
        counts = (plan.batches_per_epoch, plan.steps_per_epoch)
        assert [of_rank[index] for of_rank in found] == [(counts, plan.steps, plan.epoch_ends)] * engine.world


REFUSED: dict[str, tuple[str, Any, str]] = {
    "lazy copy": ("ddp", {"model": lambda: nn.LazyLinear(2)}, "the model is lazy"),
    "table": ("ddp", {"model": lambda: nn.Embedding(9, 2, max_norm=1.0)}, "Embedding has max_norm"),
    "lazy": ("fsdp", {"model": lambda: nn.LazyLinear(2)}, "the model is lazy"),
    "compiled": ("fsdp", {"model": lambda: torch.compile(Net(SMALL), backend="eager")}, "write compile_blocks=True"),
    "BatchNorm": ("fsdp", {"model": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))}, "drop_last=True"),
    "blocks": ("fsdp", {"fsdp_blocks": ["Blok"]}, "no module of Net is 'Blok'"),
    "mesh": ("fsdp", {"mesh": {"shard": 3}}, "is of 3 ranks, and this run has 2"),
    "no ranks": ("2-D", {"tensor_plan": PLAN, "mesh": {"shard": 2, "tensor": 1}}, "leaves 1 rank for each layer"),
    "lazy layer": ("tensor", {"model": lambda: nn.LazyLinear(2), "tensor_plan": {}}, "the model is lazy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ranks_would_refuse_is_refused(name: str) -> None:
    """The plan raises it before a rank is started."""
    engine, options, message = REFUSED[name]
    add_ons = (GradientAccumulationAddon,) if "gradient_accumulation_steps" in options else ()
    made = make((engine, add_ons, options, {}), ["cpu", "cpu"], width=SMALL)
    with pytest.raises(ConfigError, match=message):
        made.plan(1, data(2, 5))


def run(case: Case, many: tuple[int, ...]) -> list[Any]:
    """Return for each number of rows what a rank knows before the run, and after it."""
    made = []
    for rows in many:
        trainer = make(case, width=SMALL)
        plan = trainer.plan(2, data(2, rows))
        trainer.run(2, data(2, rows), data(2, 3))
        ends = [(row["epoch"], row["step"]) for row in trainer.train_history]
        made.append(((plan.batches_per_epoch, plan.steps_per_epoch), trainer.progress_checker.step, ends))
    return made


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in (1, 4))])
def test_the_memory_of_a_rank_is_that_of_the_plan(world: int) -> None:
    """At most a tenth, or a megabyte, apart from what the ranks hold when a step has its gradients."""
    check(world, CASES[world])


def test_what_is_offloaded_is_on_the_host() -> None:
    """No accelerator is needed to plan for one."""
    trainer = make(("fsdp", (), {}, {}), ["cpu"] * 2)
    trainer.cpu_offload = True
    found = str(trainer.plan(1, data()).memory)
    assert ", on the host: parameters 5.23 MB, gradients 5.23 MB, optimizer 10.5 MB" in found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "start"), [(world, at) for world in MORE for at in range(0, len(MORE[world]), 8)])
def test_what_changes_the_memory_is_in_the_plan(world: int, start: int) -> None:
    """Optimizers, accumulation, precision, blocks that stay gathered, frozen and tied parameters, HSDP and 2-D."""
    check(world, MORE[world][start : start + 8])
