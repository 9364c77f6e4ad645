"""The table of engines and features: tests/engines/test_engine_table.py walks it, docs/features/scale.md prints it.

Each cell is tried on the ranks of its engine against one process, or is refused with the remedy. A new engine is a row
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kit.engines import ENGINES, Engine, adamw, build, net
from zae import AddOnBase, ZaeError
from zae.addons import (
    AMPAddon,
    CompileAddon,
    DeepSpeedAddon,
    EMAAddon,
    GradientAccumulationAddon,
    LedgerAddon,
)

FEATURES = ("clip", "AMP", "accumulation", "EMA", "state", "sharded state", "other ranks", "validation", "ledger",
            "compile")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """How an engine and a feature go together.

    Attributes
    ----------
    text : str
        What the page says.
    add_ons, options : tuple, dict
        What the trainer of the engine and that of one process have.
    own : dict
        Options that only the engine has.
    bound : float, optional
        How far the weights may be from those of one process; by default that of the row.
    is_refused : bool
        Whether add_on, or the constructor, refuses it.
    """

    text: str
    add_ons: tuple[type[AddOnBase], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    bound: float | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class Row:
    """An engine: its title, and its cells by feature."""

    title: str
    engine: Engine
    cells: dict[str, Cell]
    kind: torch.dtype = torch.float64
    bound: float = 1e-12
    optimizer: Any = adamw
    marker: str = "exhaustive"


def gentle(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose first steps are not those of the rounding of gradients near zero."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


LEDGER: dict[str, Any] = {"ledger_path": "ledger-{rank}.jsonl", "overwrite": True}
# Bfloat16 rounds a batch otherwise than its halves: the bound is for 4 steps of SGD with a rate of 0.1.
AMP = Cell("autocast", (AMPAddon,), {"precision": "bf16"}, bound=2e-2)
COMMON = {
    "clip": Cell("yes", options={"gradient_clip": 0.05}),
    "AMP": AMP,
    "accumulation": Cell("yes", (GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
    "EMA": Cell("yes", (EMAAddon,), {"decay": 0.8}),
    "state": Cell("whole"),
    "sharded state": Cell("yes"),
    "other ranks": Cell("yes"),
    "validation": Cell("exact"),
    "ledger": Cell("by rank", (LedgerAddon,), {"ledger_path": "ledger-{rank}.jsonl"}),
    "compile": Cell("refused", (CompileAddon,), is_refused=True),
}
NOT_NEEDED = Cell("not needed")
BY_BLOCK = Cell("by block, `compile_blocks`", own={"compile_blocks": "eager"}, options={"gradient_clip": 0.05})
WHOLE_MODEL = {
    "sharded state": NOT_NEEDED,
    "compile": Cell("yes", (CompileAddon,), {"compile_backend": "eager"}),
}
NORM = Cell("over the parts", options={"gradient_clip": 0.05})
GATHERED = Cell("in parts", (EMAAddon,), {"decay": 0.8})
PADDED = Cell("exact, padded")
SHARDED = {"clip": NORM, "EMA": GATHERED, "validation": PADDED, "compile": BY_BLOCK}

STAGES = {
    "clip": Cell("over the stages", options={"gradient_clip": 0.05}),
    "AMP": Cell("autocast in each stage", (AMPAddon,), {"precision": "bf16"}, bound=2e-2),
    "EMA": Cell("in stages", (EMAAddon,), {"decay": 0.8}),
    "validation": Cell("exact, in stages"),
    "ledger": Cell("refused", (LedgerAddon,), LEDGER, is_refused=True),
}


def zero(stage: int, **cells: Cell) -> Row:
    """Return the row of DeepSpeed in a stage."""
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    engine = Engine((DeepSpeedAddon,), options={"zero_stage": stage, "deepspeed_config": config})
    own = {
        **COMMON,
        "clip": Cell("by the engine", options={"gradient_clip": 0.05}),
        "AMP": Cell("refused", (AMPAddon,), {"precision": "bf16"}, is_refused=True),
        "sharded state": NOT_NEEDED,
        "validation": PADDED,
        "ledger": Cell("refused", (LedgerAddon,), LEDGER, is_refused=True),
        **cells,
    }
    return Row(f"DeepSpeed, ZeRO {stage}", engine, own, torch.float32, 1e-6, gentle, "deepspeed")


TABLE = {
    "ddp": Row("`MultiGPUAddon`", ENGINES["ddp"], {**COMMON, **WHOLE_MODEL}),
    "accelerate": Row("`AccelerateAddon`", ENGINES["accelerate"], {**COMMON, **WHOLE_MODEL}),
    "fsdp": Row("`FSDPAddon`", ENGINES["fsdp"], {**COMMON, **SHARDED}),
    "hsdp": Row("`FSDPAddon`, hybrid", ENGINES["hsdp"], {**COMMON, **SHARDED}),
    "tensor": Row("`TensorParallelAddon`", ENGINES["tensor"], {**COMMON, "clip": NORM, "EMA": GATHERED}),
    "2-D": Row("both", ENGINES["2-D"], {**COMMON, **SHARDED}),
    "pipeline": Row("`PipelineAddon`", ENGINES["pipeline"], {**COMMON, **STAGES}),
    "zero-0": zero(0),
    "zero-1": zero(1),
    "zero-2": zero(2),
    "zero-3": zero(3, EMA=Cell("refused", (EMAAddon,), {"decay": 0.8}, is_refused=True)),
}


def refusal(row: Row, cell: Cell) -> str:
    """Return the text with which a composition is refused, before any rank is started."""
    options = {"optimizer": row.optimizer, **cell.options, **cell.own}
    try:
        build(row.engine, *cell.add_ons, model=net(row.kind), device=["cpu"] * row.engine.world, **options)
    except ZaeError as error:
        return str(error)
    raise AssertionError(f"{row.title} with {cell.add_ons} is not refused")
