"""Loops as one writes them by hand: plain PyTorch, and nothing of zae. What the trainer does is compared with them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def digest(*parts: Any) -> str:
    """SHA-256 of tensors, or of all parameters and buffers of modules."""
    sha = hashlib.sha256()
    for part in parts:
        for tensor in [part] if isinstance(part, Tensor) else part.state_dict().values():
            tensor = tensor.detach().cpu().contiguous()
            sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def data(size: int = 22, seed: int = 3) -> TensorDataset:
    """Inputs of 4 features and a class of 2."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loader(size: int = 22, batch_size: int = 4, seed: int = 3, **options: Any) -> DataLoader[Any]:
    """By default 6 batches, the last one short, in a new order each epoch, drawn from the global stream."""
    options.setdefault("shuffle", "sampler" not in options)
    return DataLoader(data(size, seed), batch_size=batch_size, **options)


def network(seed: int = 1) -> nn.Sequential:
    """All that watching could disturb: dropout draws numbers, BatchNorm has buffers and a mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2))


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=TYPES[precision]) if precision in TYPES else contextlib.nullcontext()


NORMS = (nn.BatchNorm1d, nn.LayerNorm)


def lower(model: nn.Module) -> None:
    """Convert the parameters to bfloat16, but those of norms; buffers stay."""
    for module in model.modules():
        if not isinstance(module, NORMS):
            for p in module.parameters(recurse=False):
                p.data = p.data.to(torch.bfloat16)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[Any],
    n_epoch: int,
    *,
    accumulate: int = 1,
    clip: float = 0.0,
    precision: str = "fp32",
    scale: float = 65536.0,
    dtype: str = "fp32",
    decay: float | None = None,
    patience: int | None = None,
    delta: float = 0.0,
    valid: Iterable[Any] = (),
    scheduler: Any = None,
    every_step: bool = False,
    watch: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Train a classifier with everything that a loop is usually given, in the order in which it is right."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if precision == "fp16" else None
    if dtype == "bf16":
        lower(model)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    average |= {name: value.float() for name, value in average.items() if value.dtype == torch.bfloat16}
    means, scores, waited, best = [], [], 0, float("inf")
    for _ in range(n_epoch):
        model.train()
        total, seen = 0.0, 0
        for index, (inputs, targets) in enumerate(batches):
            window = min(accumulate, len(batches) - index // accumulate * accumulate)
            with autocast(precision):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            part = loss / window if window > 1 else loss
            (part if scaler is None else scaler.scale(part)).backward()
            total, seen = total + loss.item() * len(inputs), seen + len(inputs)
            if (index + 1) % accumulate and index + 1 < len(batches):
                continue
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if watch is not None:
                watch()
            if scaler is None:
                optimizer.step()
                stepped = True
            else:
                scaler.step(optimizer)
                before = scaler.get_scale()
                scaler.update()
                stepped = scaler.get_scale() >= before
            model.zero_grad()
            optimizer.zero_grad()
            if stepped and scheduler is not None and every_step:
                scheduler.step()
            if stepped and decay is not None:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        average[name].mul_(decay).add_(p, alpha=1 - decay)
                    for name, buffer in model.named_buffers():
                        average[name].copy_(buffer)
        if scheduler is not None and not every_step:
            scheduler.step()
        means.append(total / seen)
        if valid:
            scores.append(evaluate(model, valid, precision, average if decay is not None else None))
            if best - scores[-1] > delta:
                best, waited = scores[-1], 0
            else:
                waited += 1
            if patience is not None and waited >= patience:
                break
    return {"means": means, "scores": scores, "average": average, "scaler": scaler}


def evaluate(
    model: nn.Module, batches: Iterable[Any], precision: str = "fp32", average: dict[str, Tensor] | None = None
) -> float:
    """The mean loss by sample, with the average in the model where there is one, and no trace left behind."""
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    total, seen = 0.0, 0
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.load_state_dict(kept if average is None else average)
        for inputs, targets in batches:
            with autocast(precision):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            total, seen = total + loss.item() * len(inputs), seen + len(inputs)
        model.load_state_dict(kept)
    model.train()
    return total / seen


def losses(trainer: Any, split: str = "train") -> list[float]:
    """The mean loss of each epoch, or of each validation, that a trainer has recorded."""
    rows = trainer.train_history if split == "train" else trainer.valid_history
    return [row[f"{split}_loss"] for row in rows]


class Gan(nn.Module):
    """Two networks that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
            self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def losses(self, real: Tensor) -> dict[str, Tensor]:
        """What each network is to make small."""
        fake = self.generator(torch.randn(len(real), 2))
        verdict = self.critic(fake)
        critic = nn.functional.softplus(-self.critic(real)).mean() + nn.functional.softplus(verdict).mean()
        return {"generator": nn.functional.softplus(-verdict).mean(), "critic": critic}

    def sum_of_losses(self, real: Tensor) -> Tensor:
        """One scalar whose gradient is each network's own: the fake is detached where the critic learns."""
        fake = self.generator(torch.randn(len(real), 2))
        frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
        generator = nn.functional.softplus(-torch.func.functional_call(self.critic, frozen, (fake,))).mean()
        critic = nn.functional.softplus(-self.critic(real)) + nn.functional.softplus(self.critic(fake.detach()))
        return generator + critic.mean()

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "generator": torch.optim.Adam(self.generator.parameters(), lr=0.02),
            "critic": torch.optim.RMSprop(self.critic.parameters(), lr=0.01),
        }


def train_gan(
    gan: Gan, batches: list[Tensor], n_epoch: int, *, by_loss: bool, clip: float, accumulate: int, precision: str
) -> None:
    """Two optimizers in one step, each clipped on its own."""
    optimizers = gan.optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22) if precision == "fp16" else None
    for _ in range(n_epoch):
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            for real in window:
                with autocast(precision):
                    losses = gan.losses(real) if by_loss else {"": gan.sum_of_losses(real)}
                losses = {name: loss / len(window) if len(window) > 1 else loss for name, loss in losses.items()}
                if scaler is not None:
                    losses = {name: scaler.scale(loss) for name, loss in losses.items()}
                if by_loss:
                    losses["generator"].backward(inputs=list(gan.generator.parameters()), retain_graph=True)
                    losses["critic"].backward(inputs=list(gan.critic.parameters()))
                else:
                    losses[""].backward()
            if scaler is not None:
                for optimizer in optimizers.values():
                    scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(gan.generator.parameters(), clip)
                nn.utils.clip_grad_norm_(gan.critic.parameters(), clip)
            for optimizer in optimizers.values():
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
