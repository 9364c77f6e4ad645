"""Every optimizer and every scheduler of torch, and optimizers of others whose state torch's own loading changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import zae

RATE = 0.05

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "ASGD": lambda p, **o: torch.optim.ASGD(p, lambd=0.1, t0=2, **o),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr_decay=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, amsgrad=True, **o),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "LBFGS": lambda p, **o: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe", **o),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, momentum=0.9, centered=True, **o),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p, **o: torch.optim.SGD(p, momentum=0.9, nesterov=True, **o),
    "SparseAdam": torch.optim.SparseAdam,
}
if hasattr(torch.optim, "Muon"):  # From torch 2.9 on; of matrices alone.
    OPTIMIZERS["Muon"] = torch.optim.Muon

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0, threshold_mode="abs"),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
}


class Net(nn.Module):
    """Matrices alone, so that Muon takes them too; a table with sparse gradients where that is asked for."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table: nn.Module = nn.Embedding(6, 3, sparse=sparse)
        self.linear = nn.Linear(3, 2, bias=False)
        if sparse:
            self.linear.requires_grad_(False)

    def forward(self, places: Tensor) -> Tensor:
        output: Tensor = self.linear(self.table(places))
        return output


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Task(zae.Trainer):
    """Regression, in the type of the weights; the closure of LBFGS evaluates it again."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        places, targets = batch
        self.batch = batch
        output = self.model(places)
        return {"loss": nn.functional.mse_loss(output.float(), targets)}

    test_step = train_step

    def step_one(self, optimizer: Optimizer) -> bool:
        if not isinstance(optimizer, torch.optim.LBFGS):
            return super().step_one(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = self.train_step(self.batch)["loss"]
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return True


def batches(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(6, (5,), generator=generator), torch.randn(5, 2, generator=generator)) for _ in range(count)]


def make(
    optimizer: Callable[..., Optimizer],
    scheduler: Callable[[Optimizer], Any] | None = None,
    dtype: torch.dtype = torch.float32,
    cls: Any = Task,
    lr: Any = RATE,
    **options: Any,
) -> Any:
    """Return a trainer with an optimizer and a scheduler that are made already."""
    sparse = optimizer is torch.optim.SparseAdam
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(sparse).to(dtype)
    made = optimizer(parameters_of(model), lr=lr)
    return cls(model, "cpu", optimizer=made, scheduler=scheduler and scheduler(made), log_bar=False, **options)
