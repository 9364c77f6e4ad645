"""What CompileAddon saves beside the manual loop: python benchmarks/compiling.py.

For each model and target, all in one process: half of the manual loop, the trainer, the other half of the manual loop,
as CPU time; and what the compiler took, and after how many steps it has paid.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from statistics import median
from typing import Any

import torch
from harness import Batches, cnn, cpu_time, difference, images, loss_of, mlp, vectors
from overhead import SETTINGS, machine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zae
from zae.addons.compile import CompileAddon

EPOCHS = {"free": 4, "cnn": 8, "transformer": 4}  # Of one repetition; even.
TARGETS = ("eager", "model", "step")
TITLES = {"free": "tiny MLP, free loader", "cnn": "CNN", "transformer": "transformer"}


class Task(zae.Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": loss_of(self.model, batch)}

    test_step = train_step


class Transformer(nn.Module):
    """Two layers of width 64 over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(self.embed(tokens)).mean(1))
        return output


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, 100, (640, 32), generator=generator)
    return TensorDataset(draw, torch.randint(0, 5, (640,), generator=generator))


WORKLOADS: dict[str, Any] = {
    "free": lambda: (mlp(), Batches(vectors(16000))),
    "cnn": lambda: (cnn(), Batches(images())),
    "transformer": lambda: (Transformer(), Batches(tokens())),
}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, epochs: int) -> None:
    for _ in range(epochs):
        model.train()
        total, seen = 0.0, 0
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total, seen = total + loss.item() * len(batch[0]), seen + len(batch[0])


def make(workload: str, target: str) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any, float]:
    """A trainer, and what the manual loop is given; both are warm. And how far their weights are apart."""
    torch.manual_seed(0)
    model, loader = WORKLOADS[workload]()
    bare = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    options: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)}
    if target == "eager":
        trainer: Any = Task(model, "cpu", log_bar=False, **options)
    else:
        trainer = Task.add_on(CompileAddon)(model, "cpu", log_bar=False, compile_target=target, **options)
    by_hand(bare, optimizer, loader, 1)
    trainer.run(1, loader)
    furthest = difference(bare, trainer.unwrap())
    return trainer, bare, optimizer, loader, furthest


def measure(workload: str, target: str, repeats: int) -> dict[str, Any]:
    """Half of the manual loop, the trainer, the other half, so many times."""
    trainer, bare, optimizer, loader, furthest = make(workload, target)
    report = {} if target == "eager" else dict(trainer.compile_report)
    half, ratios, hands = EPOCHS[workload] // 2, [], []
    for _ in range(repeats):
        first = cpu_time(lambda: by_hand(bare, optimizer, loader, half))
        theirs = cpu_time(lambda: trainer.run(2 * half, loader))
        second = cpu_time(lambda: by_hand(bare, optimizer, loader, half))
        ratios.append(theirs / (first + second))
        hands.append((first + second) / (2 * half * len(loader)))
    hand = median(hands)
    gain, seconds = hand * (1 - median(ratios)), report.get("compile_seconds", 0.0)
    return {
        "ratios": sorted(ratios),
        "hand": hand,
        "difference": furthest,
        "seconds": seconds,
        "pays_after": f"{seconds / gain:,.0f}" if gain > 0 else "never",
    }


def row(workload: str, target: str, found: dict[str, Any]) -> str:
    ratios = found["ratios"]
    compiled = " | " if target == "eager" else f"{found['seconds']:.1f} | {found['pays_after']}"
    name = "trainer, eager" if target == "eager" else f'"{target}"'
    return (
        f"| {TITLES[workload]} | {name} | {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | "
        f"{found['hand'] * 1e6:,.0f} | {compiled} | {found['difference']:.1g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=[*TARGETS])
    arguments = parser.parse_args()
    if "MALLOC_ARENA_MAX" not in os.environ:  # The allocator reads its settings when a process begins.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    torch.set_num_threads(1)
    lines = [f"{machine()}; {arguments.repeats} repetitions.", ""]
    heads = ["model", "target", "ratio to the manual loop", "manual loop, microseconds per step",
             "compiling, seconds", "breakeven steps", "largest difference of a weight, first epoch"]  # fmt: skip
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # Nothing is there from an earlier time.
        torch.compile(lambda value: value + 1)(torch.ones(3))  # What the compiler needs to begin with.
        for workload in arguments.workloads:
            for target in arguments.targets:
                lines.append(row(workload, target, measure(workload, target, arguments.repeats)))
                sys.stderr.write(lines[-1] + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
