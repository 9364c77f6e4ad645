"""Models, data and the loop by hand for the tests on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zae

DEVICE = os.environ.get("ZAE_EMULATED_DEVICE", "cuda")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Attention(nn.Module):
    """A transformer layer over tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens))).flatten(0, 1)


def dense(dropout: float = 0.1) -> nn.Module:
    """Return a small network with dropout and layer norm."""
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))


def convolution() -> nn.Module:
    """Return a small convolution with batch norm."""
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), *pooled)


MODELS: dict[str, Callable[[], nn.Module]] = {"dense": dense, "convolution": convolution, "attention": Attention}


def data(kind: str = "dense", samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets on the host."""
    generator = torch.Generator().manual_seed(5)
    if kind == "dense":
        inputs = torch.randn(samples, 8, generator=generator)
        return inputs, inputs.sum(1, keepdim=True)
    if kind == "convolution":
        return torch.randn(samples, 3, 12, 12, generator=generator), torch.randint(4, (samples,), generator=generator)
    return torch.randint(50, (samples, 7), generator=generator), torch.randint(50, (samples, 7), generator=generator)


def loader(kind: str = "dense", samples: int = 64, batch_size: int = 16, **options: Any) -> DataLoader:
    """Return a shuffled loader with a generator of its own."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*data(kind, samples)), batch_size, shuffle=True, generator=generator, **options)


def loss_of(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error for numbers, cross entropy for classes."""
    if target.is_floating_point():
        return nn.functional.mse_loss(prediction, target)
    return nn.functional.cross_entropy(prediction, target.flatten())


class Task(zae.Trainer):
    def train_step(self, batch):
        inputs, target = batch
        return {"loss": loss_of(self.model(inputs), target)}

    test_step = train_step


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": adamw,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, capturable=True),
    "tensor_lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), capturable=True),
}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model on the host."""
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare to the bit."""
    assert one.keys() == other.keys()
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, f"differ: {differing}"


def train_by_hand(
    kind: str,
    make_optimizer: MakeOptimizer,
    *,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    accumulation: int = 1,
) -> dict[str, torch.Tensor]:
    """Train for two epochs of four batches in plain PyTorch, with the norm of the gradients clipped at 1."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(DEVICE)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled)
    batches = loader(kind)
    for _ in range(2):
        for index, (inputs, target) in enumerate(batches):
            inputs, target = inputs.to(DEVICE), target.to(DEVICE)
            with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
                loss = loss_of(model(inputs), target)
            scaler.scale(loss / accumulation).backward()
            if (index + 1) % accumulation == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return weights(model)
