"""CUDA graphs: a loss that lies in a static buffer, which the next step overwrites, is recorded right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from device.on_device.tasks import data, dense
from torch import Tensor, nn

import zae
from gpu.report import Report
from gpu.settings import DEVICE, IS_EMULATED, why_not_compiled
from zae.addons import GradientAccumulationAddon

Wrap = Callable[[nn.Module], Any]


class WithLoss(nn.Module):
    """A model that returns its loss, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense(0.0)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.network(inputs), target)


def run(report: Report) -> None:
    """Compare the recorded mean of an epoch with one that is summed at once."""
    for name, wrap, window in ways():
        with report.guard(name):
            if IS_EMULATED:
                report.leave_out(name, "the emulation has no graphs")
            elif "reduce-overhead" in name and (reason := why_not_compiled()):
                report.leave_out(name, reason)
            else:
                compare(report, name, wrap, window)


def ways() -> Iterator[tuple[str, Wrap, int]]:
    """Yield how a model comes to be a graph, and how many batches a step has."""
    yield "make_graphed_callables", graphed, 1
    yield "make_graphed_callables, steps of two batches", graphed, 2
    yield "reduce-overhead", lambda model: torch.compile(model, mode="reduce-overhead"), 1


def graphed(model: nn.Module) -> Any:
    """Make a graph of the forward and one of the backward."""
    call = torch.cuda.make_graphed_callables(model, example())
    for parameter in model.parameters():  # Else the gradient of the next batch is written over that of this one.
        parameter.register_hook(lambda gradient: gradient.clone())
    return call


def example() -> Any:
    """Return tensors of a batch's shapes, which the graph keeps."""
    return tuple(each.clone() for each in batches()[0])


def batches() -> list[Any]:
    """Return ten different batches on the device."""
    inputs, target = data(samples=160)
    return [(inputs[i : i + 16].to(DEVICE), target[i : i + 16].to(DEVICE)) for i in range(0, 160, 16)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def compare(report: Report, name: str, wrap: Wrap, window: int) -> None:
    """Train the same model by hand and by zae."""
    expected, by_hand = train_by_hand(wrap, window)
    torch.manual_seed(0)
    model = WithLoss().to(DEVICE)
    call = wrap(model)

    class Task(zae.Trainer):
        def train_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": call(*batch)}

        test_step = train_step

    cls = Task.add_on(GradientAccumulationAddon) if window > 1 else Task
    options = {"gradient_accumulation_steps": window} if window > 1 else {}
    history = cls(model, DEVICE, optimizer=sgd, log_bar=False, **options).run(1, batches())
    found = history["train_metrics_history"][-1]["loss"]
    is_same = abs(found - expected) <= 1e-4 * abs(expected)
    is_same = is_same and all(map(torch.allclose, by_hand.parameters(), model.parameters()))
    report.check(name, is_same, f"the mean loss is {found:.6f}, and {expected:.6f} by hand")


def train_by_hand(wrap: Wrap, window: int) -> tuple[float, nn.Module]:
    """Train, and add each loss up before the next batch; return the mean, and the model."""
    torch.manual_seed(0)
    model = WithLoss().to(DEVICE)
    call = wrap(model)
    optimizer = sgd(model.parameters())
    total = torch.zeros((), device=DEVICE)
    for index, batch in enumerate(batches()):
        loss = call(*batch)
        (loss / window).backward()
        total += loss.detach()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return total.item() / len(batches()), model
