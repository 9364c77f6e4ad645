"""CUDA graphs: a loss that lies in a static buffer, which the next step overwrites, is recorded right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from device.on_device.tasks import data, dense
from torch import Tensor, nn

import zae
from gpu.report import Report
from gpu.settings import DEVICE, IS_EMULATED


class WithLoss(nn.Module):
    """A model that returns its loss, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense(0.0)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.network(inputs), target)


def run(report: Report) -> None:
    """Compare the recorded mean of an epoch with one that is summed at once."""
    for name, wrap in ways():
        with report.guard(name):
            if IS_EMULATED:
                report.leave_out(name, "the emulation has no graphs")
            else:
                compare(report, name, wrap)


def ways() -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    """Yield how a model comes to be a graph."""
    yield "make_graphed_callables", lambda model: torch.cuda.make_graphed_callables(model, example())
    yield "reduce-overhead", lambda model: torch.compile(model, mode="reduce-overhead")


def example() -> Any:
    """Return tensors of a batch's shapes, which the graph keeps."""
    return tuple(each.clone() for each in batches()[0])


def batches() -> list[Any]:
    """Return ten different batches on the device."""
    inputs, target = data(samples=160)
    return [(inputs[i : i + 16].to(DEVICE), target[i : i + 16].to(DEVICE)) for i in range(0, 160, 16)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def compare(report: Report, name: str, wrap: Callable[[nn.Module], Any]) -> None:
    """Train the same model by hand and by zae."""
    expected = mean_by_hand(wrap)
    torch.manual_seed(0)
    model = WithLoss().to(DEVICE)
    call = wrap(model)

    class Task(zae.Trainer):
        def train_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": call(*batch)}

        test_step = train_step

    history = Task(model, DEVICE, optimizer=sgd, log_bar=False).run(1, batches())
    found = history["train_metrics_history"][-1]["loss"]
    is_same = abs(found - expected) <= 1e-4 * abs(expected)
    report.check(name, is_same, f"the mean loss is {found:.6f}, and {expected:.6f} by hand")


def mean_by_hand(wrap: Callable[[nn.Module], Any]) -> float:
    """Train, and add each loss up before the next step."""
    torch.manual_seed(0)
    model = WithLoss().to(DEVICE)
    call = wrap(model)
    optimizer = sgd(model.parameters())
    total = torch.zeros((), device=DEVICE)
    for batch in batches():
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total.item() / len(batches())
