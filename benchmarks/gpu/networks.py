"""What is trained where speed is measured: a small network, and a GPT of about 124 million parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu.settings import DEVICE, SMALL

VOCABULARY, LENGTH, ROWS = (96, 16, 2) if SMALL else (50304, 1024, 8)
WIDTH, DEPTH, HEADS = (32, 2, 2) if SMALL else (768, 12, 12)


class Block(nn.Module):
    """Attention and a network of two layers, with the norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        rows, length, _ = values.shape
        parts = self.inputs(self.norms[0](values)).view(rows, length, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.output(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return values + self.network(self.norms[1](values))


class GPT(nn.Module):
    """The sizes of GPT-2's smallest model; the embedding of the tokens is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.norm(self.blocks(self.tokens(tokens) + self.places))
        return nn.functional.linear(values, self.tokens.weight).flatten(0, 1)


def small() -> nn.Module:
    """Return a network whose step is as short as one on a GPU can be: what is measured is the host."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def small_batch() -> tuple[Tensor, Tensor]:
    """Return inputs and classes on the device."""
    return torch.randn(256, 64, device=DEVICE), torch.randint(10, (256,), device=DEVICE)


def gpt_batch() -> tuple[Tensor, Tensor]:
    """Return rows of tokens, and the token that follows each, on the device."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), device=DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt_flops() -> float:
    """Return the operations of a step: 6 for a parameter and a token, and the products of attention (as in PaLM)."""
    with torch.device("meta"):
        parameters = sum(each.numel() for each in GPT().parameters())
    of_a_token = 6 * parameters + 12 * DEPTH * WIDTH * LENGTH
    return of_a_token * ROWS * LENGTH


def peak_flops() -> float | None:
    """Return the bfloat16 operations a second that the device can make; None where that is not known."""
    name = torch.cuda.get_device_name()
    peaks = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12}  # As the maker states them, for dense products.
    return next((peak for part, peak in peaks.items() if part in name), None)


@dataclass(frozen=True)
class Job:
    """What is trained, for how many steps and rounds, and in which precision."""

    title: str
    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    is_bf16: bool
    rounds: int = 1
    flops: float | None = None

    def model(self) -> nn.Module:
        """Return a new network on the device, the same each time."""
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return self.network()

    def batches(self) -> list[Any]:
        """Return the batches of a run, on the device."""
        torch.manual_seed(1)
        different = [self.batch() for _ in range(4)]
        return [different[step % 4] for step in range(self.steps)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return what every contestant steps with."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets.flatten())


class Clock:
    """A loader whose batches are there; it measures the steps between two of them, after waiting for the device.

    So neither the loader is measured, nor what a library does before its first step and after its last one.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.first = max(2, len(batches) // 10)  # The steps before it allocate, import and choose kernels.
        self.times: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if index in (self.first, len(self) - 1):
                torch.cuda.synchronize()
                self.times.append(time.perf_counter())
            yield batch

    def seconds(self) -> float:
        """Return the seconds of a step."""
        began, ended = self.times
        return (ended - began) / (len(self) - 1 - self.first)
