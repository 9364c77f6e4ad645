"""Random compositions of engine, model, optimizer, add-ons, loaders and a stop, each against plain PyTorch.

A case gives the weights of a loop by hand in one process, to 1e-12, or is refused in words. It is drawn from its seed:

    python -m pytest -n 0 -m exhaustive tests/engines/test_fuzz.py                       # the fixed seeds
    ZAE_FUZZ=100:400 python -m pytest -n 0 -m exhaustive tests/engines/test_fuzz.py      # these seeds

A failure names the command that repeats it, and the smallest case that fails like it.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kit.engines import ENGINES, F64, VOCABULARY, Block, Net, build
from zae import Trainer
from zae.addons import (
    AccelerateAddon,
    EMAAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    PipelineAddon,
    StateManagerAddon,
    TensorParallelAddon,
)
from zae.errors import ZaeError

LIMIT = 1e-12
GLOBAL_BATCH = 12  # Samples of all ranks in one batch: a number of ranks may become 1, 2, 3 or 4 others.
FIXED = 80
# Pipelines refuse most models here.
DRAWN = [name for name, each in ENGINES.items() if PipelineAddon not in each.add_ons]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9),
}
REMEDIES = ("write ", "use ", "leave ", "train with", "give ", "freeze", "put ", "let ", "set ")


@dataclass(frozen=True)
class Case:
    """What is composed; the defaults are the simplest, to which `smallest` goes back one by one."""

    engine: str = "ddp"
    optimizer: str = "sgd"
    rows: int = 24
    valid_rows: int = 0
    epochs: int = 1
    clip: float = 0.0
    accumulate: int = 1
    decay: float | None = None
    scheduled: bool = False
    counted: bool = False
    tied: bool = False
    frozen: tuple[str, ...] = ()
    spare: bool = False  # A block that takes part in every second step only.
    several: bool = False  # Batches are dicts with two inputs.
    stop: int = 0  # The step after which the run is stopped, or killed, and resumed from a checkpoint.
    killed: bool = False
    save_format: str = "sharded"
    resumed: str = ""  # The engine that continues; "" is the same one in one process.


def draw(seed: int) -> Case:
    """Draw a case."""
    of = random.Random(seed)
    engine = of.choice(DRAWN)
    tied = of.random() < 0.2
    others = [name for name in DRAWN if not (tied and TensorParallelAddon in ENGINES[name].add_ons)]
    frozen = [name for name in ("embed", "blocks.0", "norm", "head") if of.random() < 0.15]
    return Case(
        engine=engine, optimizer=of.choice(list(OPTIMIZERS)), rows=of.randint(13, 61), epochs=of.randint(1, 2),
        valid_rows=of.choice((0, of.randint(1, 15))), clip=of.choice((0.0, 0.05, float("inf"))),
        accumulate=of.choice((1, 1, 2, 3)), decay=of.choice((None, 0.8)), scheduled=of.random() < 0.4,
        counted=of.random() < 0.4, tied=tied, frozen=tuple(frozen), spare=of.random() < 0.3,
        several=of.random() < 0.4, stop=of.choice((0, 1, 2, 3)), killed=of.random() < 0.5,
        save_format=of.choice(("sharded", "safetensors")), resumed=of.choice(("", *others)),
    )  # fmt: skip


# ------------------------------------------------------------------------------------- the part of the user


class Rows(Dataset[Any]):
    """Sequences, as a tuple or as a dict with a second input."""

    def __init__(self, rows: int, several: bool) -> None:
        of = torch.Generator().manual_seed(1)
        self.tokens, self.shifts = torch.randint(VOCABULARY, (rows, 6), generator=of), torch.rand(rows, generator=of)
        self.several = several

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        tokens, shift = self.tokens[index], self.shifts[index].to(F64)
        return {"tokens": tokens, "shift": shift} if self.several else (tokens,)


class Shift(nn.Module):
    """Add a number to each row, where there is one."""

    def forward(self, inputs: Tensor, shift: Tensor | None) -> Tensor:
        return inputs if shift is None else inputs + shift[:, None, None]


class Fuzzed(nn.Module):
    """The network of the engines, with what a case adds."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = Net()
        self.shift = Shift()
        self.spare = Block() if case.spare else None
        if case.tied:
            self.net.head.weight = self.net.embed.weight
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not name.startswith(case.frozen or ("none",)))

    def forward(self, tokens: Tensor, shift: Tensor | None = None, with_spare: bool = False) -> Tensor:
        x = self.net.embed(tokens)
        x = self.shift(x, shift)
        for block in [*self.net.blocks, *([self.spare] if with_spare else [])]:
            x = block(x)
        return self.net.scale(self.net.head(self.net.norm(x)))


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return Fuzzed(case).to(F64)


def loss_of(model: Any, batch: Any, case: Case, step: int) -> tuple[Tensor, int]:
    """Return the mean loss of a batch, and the number of its targets."""
    tokens, shift = (batch["tokens"], batch["shift"]) if case.several else (batch[0], None)
    logits = model(tokens[:, :-1], shift, case.spare and step % 2 == 0)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), tokens[:, 1:].numel()


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def loader_of(case: Case, shares: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(Rows(case.rows, case.several), GLOBAL_BATCH // shares, shuffle=True, generator=generator)


# ------------------------------------------------------------------------------------- the loop by hand


def by_hand(case: Case) -> tuple[dict[str, Tensor], list[float], int]:
    """Return weights, losses of the validations, and steps."""
    model, step, validated = model_of(case), 0, []
    optimizer = OPTIMIZERS[case.optimizer]([each for each in model.parameters() if each.requires_grad])
    scheduler = scheduler_of(optimizer) if case.scheduled else None
    average, loader = copy.deepcopy(model), loader_of(case, 1)
    for _ in range(case.epochs):
        for window in windows(loader, case.accumulate):
            losses = [loss_of(model, batch, case, step) for batch in window]
            total = sum(count for _, count in losses)
            for loss, count in losses:
                (loss * count / total if case.counted else loss / len(window)).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if scheduler is not None:
                scheduler.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(case.decay or 0.0).add_(parameter, alpha=1 - (case.decay or 0.0))
        if case.valid_rows:
            validated.append(validate(average, case, step))
    ends = {"": model.state_dict(), "average.": average.state_dict() if case.decay else {}}
    return {prefix + key: each for prefix, state in ends.items() for key, each in state.items()}, validated, step


def windows(loader: DataLoader[Any], size: int) -> Iterator[list[Any]]:
    batches = list(loader)
    yield from (batches[first : first + size] for first in range(0, len(batches), size))


@torch.no_grad()
def validate(model: nn.Module, case: Case, step: int) -> float:
    """Return the mean loss by sample."""
    total, weight = 0.0, 0
    for batch in DataLoader(Rows(case.valid_rows, case.several), 2):
        loss, count = loss_of(model, batch, case, step)
        total, weight = total + float(loss) * count, weight + count
    return total / weight


# ------------------------------------------------------------------------------------- the same with zae


class Killed(BaseException):
    """The end of a run that nobody could foresee: nothing is saved."""


class Task(Trainer):
    """The same steps; a run may be killed after one of them."""

    case: Case
    dies_after = 0

    def train_step(self, batch: Any) -> Any:
        if self.dies_after and self.progress_checker.step == self.dies_after:
            raise Killed
        loss, count = loss_of(self.model, batch, self.case, self.progress_checker.step)
        return {"loss": loss, "num_targets": count} if self.case.counted else {"loss": loss}

    def test_step(self, batch: Any) -> Any:
        return {"loss": loss_of(self.model, batch, self.case, self.progress_checker.step)[0]}


def train(case: Case, engine: str, folder: Path, resume: bool, stops: bool, alone: bool = False) -> tuple[Any, str]:
    """Train a part of a case, or all of it; return how it ended, or why it was refused."""
    kind = ENGINES[engine]
    if alone:
        kind = replace(kind, world=1, shares=1, options={**kind.options, "mesh": {}})
    options: dict[str, Any] = {"gradient_clip": case.clip, "save_path": folder, "save_every": 1, "keep_last": None}
    options |= {"save_format": case.save_format, "resume": "auto", "reshard": True}
    options |= {"scheduler": scheduler_of, "scheduler_step_on_batch": True} if case.scheduled else {}
    options |= {"decay": case.decay} if case.decay else {}
    options |= {"gradient_accumulation_steps": case.accumulate} if case.accumulate > 1 else {}
    if MultiGPUAddon in kind.add_ons and case.spare:
        options["find_unused_parameters"] = True
    if AccelerateAddon in kind.add_ons and case.spare:
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        options["accelerator_args"] = {"kwargs_handlers": handlers}
    if "tensor_plan" in kind.options:
        options["tensor_plan"] = {f"net.{name}": style for name, style in kind.options["tensor_plan"].items()}
    add_ons = [StateManagerAddon] + [EMAAddon] * bool(case.decay) + [GradientAccumulationAddon] * (case.accumulate > 1)
    try:
        model = model_of(case)
        trained = [each for each in model.parameters() if each.requires_grad]
        trainer = build(
            kind, *add_ons, task=Task, model=model, optimizer=OPTIMIZERS[case.optimizer](trained), **options
        )
        trainer.case, trainer.dies_after = case, case.stop if stops and case.killed else 0
        valid = DataLoader(Rows(case.valid_rows, case.several), 2) if case.valid_rows else None
        limits = {"max_steps": case.stop} if stops and not case.killed else {}
        trainer.run(case.epochs, loader_of(case, kind.shares), valid, **limits)
    except Killed:
        return None, ""
    except ZaeError as error:
        if resume:  # What one part has saved the other has to continue.
            raise
        return None, f"{type(error).__name__}: {error}"
    assert trainer.world_size == kind.world == (1 if alone else dist.get_world_size())
    ends = {"": trainer.model_state(), "average.": {}}
    if case.decay:
        ends["average."] = {name: trainer.engine.full_tensors(each) for name, each in trainer.average.items()}
    found = {prefix + key: each.detach().clone() for prefix, state in ends.items() for key, each in state.items()}
    losses = [row["loss"] for row in trainer.valid_history] if case.valid_rows else []
    return (found, losses, trainer.progress_checker.step), ""


def differs(case: Case, folder: Path, crews: Any) -> str | None:
    """Return what differs from the loop by hand; "" if nothing does, None if the case is refused in words.

    Only divided layers that share a weight with others are refused.
    """

    def part(engine: str, *stage: bool) -> list[Any]:
        if not engine:
            return [train(case, case.engine, folder, *stage, alone=True)]
        return crews(ENGINES[engine].world).call(train, case, engine, folder, *stage)

    weights, losses, steps = by_hand(case)
    stops = 0 < case.stop < steps
    try:
        ends = part(case.engine, False, stops)
        refusals = {why for _, why in ends}
        if refusals != {""}:
            text = max(refusals)
            is_told = all(refusals) and any(each in text.lower() for each in REMEDIES)
            return None if is_told else f"refused without a remedy, or not by all ranks: {refusals}"
        if stops:
            ends = part(case.resumed, True, False)
    except AssertionError as error:
        return str(error)
    for rank, ((found, validated, step), _) in enumerate(ends):
        if (step, found.keys()) != (steps, weights.keys()):
            return f"rank {rank}: {step} steps instead of {steps}, or other weights: {found.keys() ^ weights.keys()}"
        far = {name: float((found[name] - weights[name]).abs().max()) for name in found if "key.bias" not in name}
        if not max(far.values()) < LIMIT:  # Else a NaN would pass.
            return f"rank {rank}: {max(far, key=lambda name: far[name])} is {max(far.values()):.1e} apart"
        if validated != pytest.approx(losses, rel=1e-9):
            return f"rank {rank}: validations {validated} instead of {losses}"
    return ""


def smallest(case: Case, folder: Path, crews: Any) -> Case:
    """Go back to the default of one field after the other, as long as the case fails."""
    for field in fields(case):
        simpler = replace(case, **{field.name: field.default})
        if simpler != case and differs(simpler, folder / field.name, crews):
            case = simpler
    return case


def seeds() -> list[Any]:
    """Return the fixed seeds, or the chosen ones; by default one of each kind of data parallel ranks runs."""
    first, _, last = os.environ.get("ZAE_FUZZ", f":{FIXED}").partition(":")
    small = ("", "ddp", "fsdp")
    cases = {seed: draw(seed) for seed in range(FIXED)}
    default = [
        next(seed for seed, case in cases.items() if case.engine == name and case.stop and case.resumed in small)
        for name in ("ddp", "fsdp")
    ]
    chosen = range(int(first or 0), int(last)) if last else range(int(first))
    return [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed not in default)) for seed in chosen]


@pytest.mark.parametrize("seed", seeds())
def test_a_random_composition_is_the_loop_by_hand(seed: int, tmp_path: Path, crews: Any) -> None:
    case = draw(seed)
    told = differs(case, tmp_path / "case", crews)
    assert told is not None or (case.tied and TensorParallelAddon in ENGINES[case.engine].add_ons), f"refused: {case}"
    if told:
        again = f"ZAE_FUZZ={seed}:{seed + 1} python -m pytest -n 0 -m '' tests/engines/test_fuzz.py"
        pytest.fail(f"{told}\n{case}\nthe smallest that fails: {smallest(case, tmp_path, crews)}\nagain: {again}")


def test_what_is_drawn_covers_every_choice() -> None:
    """Each engine, and each value of a choice, is in the fixed cases many times."""
    cases = [draw(seed) for seed in range(FIXED)]
    for field in fields(Case):
        if field.name not in ("rows", "valid_rows", "frozen"):
            values = [getattr(case, field.name) for case in cases]
            assert len({*values}) > 1
            assert min(values.count(value) for value in {*values}) >= 5, field.name


CHANGES: dict[str, Any] = {
    "optimizer": "adamw", "clip": 0.05, "accumulate": 2, "scheduled": True, "tied": True, "frozen": ("head",),
    "spare": True, "several": True, "epochs": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", [*CHANGES, "counted"])
def test_each_choice_bites(field: str) -> None:
    """A choice that changed nothing would compare nothing."""
    simple = Case(rows=15, accumulate=2) if field == "counted" else Case(rows=27)
    plain, other = by_hand(simple), by_hand(replace(simple, **{field: CHANGES.get(field, True)}))
    assert any(not torch.equal(value, other[0][name]) for name, value in plain[0].items())
