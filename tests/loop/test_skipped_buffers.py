"""A step that is left out because it is not finite leaves no trace in the buffers of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kit.hand import digest
from kit.ranks import on_ranks
from zae import Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    SpikeGuardAddon,
    StateManagerAddon,
)
from zae.checkpoint.weights import load_weights
from zae.errors import NonFiniteError

BAD = 5  # The batch with a NaN, of twelve.


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def batches(bad: int | None = BAD) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    made = [torch.randn(6, 4, generator=generator) for _ in range(12)]
    if bad is not None:
        made[bad][2, 1] = math.nan
    return made


class Codebook(nn.Module):
    """Statistics of its inputs, kept in each of the ways in which modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by_data", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("history", torch.zeros(1, 4))
        self.register_buffer("aside", torch.zeros(4), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("expanded", torch.ones(1).expand(4))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            mean = inputs.detach().mean(0)
            self.by_data.data.mul_(0.9).add_(mean)  # As code books of VQ-VAE do it: no version counts this.
            self.replaced = self.replaced * 0.9 + mean
            self.history = torch.cat([self.history, mean[None]])
            self.aside.lerp_(mean, 0.5)
            self.seen += 1
        return inputs - 0.1 * (self.by_data + self.replaced + self.aside + self.history.mean(0)) * self.expanded


def network(norm: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(norm(), nn.Linear(4, 3))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(4),
    "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "instance": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "of one's own": Codebook,
    "twice in the model": lambda: (lambda norm: nn.Sequential(norm, nn.Linear(4, 4), norm))(nn.BatchNorm1d(4)),
}


def train(data: list[Tensor], norm: str, *add_ons: Any, **options: Any) -> Any:
    torch.manual_seed(2)
    trainer = Task.add_on(*add_ons)(
        network(NORMS[norm]), "cpu", optimizer=torch.optim.AdamW, on_nonfinite="skip", log_bar=False, **options
    )
    trainer.run(1, data)
    return trainer


def held(trainer: Any) -> str:
    model = trainer.unwrap()
    return digest(model, *(buffer for _, buffer in model.named_buffers()))


@pytest.mark.parametrize("norm", list(NORMS))
def test_a_skipped_step_is_one_that_never_was(norm: str) -> None:
    skipped = train(batches(), norm)
    assert skipped.progress_checker.skipped_steps == 1
    assert held(skipped) == held(train(batches(None)[:BAD] + batches(None)[BAD + 1 :], norm))


@pytest.mark.parametrize(
    ("add_ons", "options"),
    [
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
        ((EMAAddon,), {"decay": 0.5}),
        ((AMPAddon,), {"precision": "bf16"}),
        ((AMPAddon,), {"precision": "fp16", "loss_scale": (8.0, 1.0)}),
        ((SpikeGuardAddon,), {}),
    ],
)
def test_beside_an_add_on(add_ons: Any, options: Any) -> None:
    """A window is left out as a whole, and an average has the buffers of the model."""
    window = options.get("gradient_accumulation_steps", 1)
    first = BAD // window * window
    others = batches(None)[:first] + batches(None)[first + window :]
    skipped, other = (train(data, "batch", *add_ons, **options) for data in (batches(), others))
    assert held(skipped) == held(other)
    if EMAAddon in add_ons:
        assert digest(*skipped.average.values()) == digest(*other.average.values())


def test_a_spike_that_is_not_finite_leaves_no_trace() -> None:
    trainer = Task.add_on(SpikeGuardAddon)(
        network(NORMS["batch"]), "cpu", optimizer=torch.optim.AdamW, on_nonfinite="warn", log_bar=False
    )
    trainer.run(1, batches())
    assert [each["step"] for each in trainer.spikes] == [BAD + 1]
    assert held(trainer) == held(train(batches(None)[:BAD] + batches(None)[BAD + 1 :], "batch"))


def test_a_checkpoint_of_a_skipped_step_is_finite_and_resumes(tmp_path: Any) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"save_path": folder, "save_every": 1, "keep_last": None}
    straight = train(batches(), "batch", StateManagerAddon, **options)
    for path in folder.glob("step-*"):
        assert all(bool(each.isfinite().all()) for each in load_weights(path).values())
    resumed = Task.add_on(StateManagerAddon)(
        network(NORMS["batch"]), "cpu", optimizer=torch.optim.AdamW, on_nonfinite="skip", log_bar=False,
        save_path=tmp_path / "again", resume=folder / f"step-{BAD + 1:08}",
    )  # fmt: skip
    resumed.run(1, batches())
    assert held(resumed) == held(straight)


def test_an_error_names_the_statistics_that_the_forward_has_spoilt() -> None:
    trainer = Task(network(NORMS["batch"]), "cpu", optimizer=torch.optim.AdamW, log_bar=False)
    with pytest.raises(NonFiniteError, match=r"NaN or infinite values into 0\.running_mean, 0\.running_var"):
        trainer.run(1, batches())


@on_ranks(2)
def test_on_ranks(world: int) -> None:
    """The NaN is in the sample of one rank, and no rank has it in its buffers."""
    data = [torch.cat(pair) for pair in zip(batches()[::2], batches()[1::2], strict=True)]
    good = [torch.cat(pair) for pair in zip(batches(None)[::2], batches(None)[1::2], strict=True)]
    samples, others = torch.cat(data), torch.cat(good[: BAD // 2] + good[BAD // 2 + 1 :])
    made = []
    for tensor in (samples, others):
        loader = torch.utils.data.DataLoader(tensor, batch_size=6)
        made.append(held(train(loader, "batch", MultiGPUAddon)))
    assert made[0] == made[1]
