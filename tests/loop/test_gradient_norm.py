"""`gradient_clip=math.inf` logs the norm of the gradients, and changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.hand import Gan, digest, loader, network
from kit.table import Task
from zae import ConfigError, NonFiniteError, Trainer
from zae.addons import AMPAddon, GradientAccumulationAddon, StateManagerAddon

BATCHES = [torch.randn(4, 4, generator=torch.Generator().manual_seed(index)) for index in range(5)]


class Noting(Trainer):
    """Note the norm of all gradients after the clip, as by hand."""

    def clip(self) -> None:
        super().clip()
        if not hasattr(self, "noted"):
            self.noted: list[float] = []
        found = [p.grad for p in self.parameters if p.grad is not None]
        self.noted.append(float(torch.stack([each.norm() for each in found]).norm()))


class NotingTask(Task, Noting):
    pass


class GanTask(Trainer):
    """Two losses for two optimizers."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model.losses(batch)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": sum(self.model.losses(batch).values())}


class NotingGan(GanTask, Noting):
    pass


def train(task: Any, *add_ons: Any, clip: float, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Gan() if issubclass(task, GanTask) else network()
    optimizer = model.optimizers() if isinstance(model, Gan) else torch.optim.AdamW(model.parameters(), lr=0.05)
    options = {"optimizer": optimizer, "gradient_clip": clip, "log_bar": False, "log_every": 1, **options}
    trainer = task.add_on(*add_ons)(model, "cpu", **options)
    trainer.run(2, BATCHES if isinstance(model, Gan) else loader())
    return trainer


WAYS: dict[str, tuple[Any, ...]] = {
    "plain": (NotingTask,),
    "windows of bf16": (NotingTask, AMPAddon, GradientAccumulationAddon),
    "fp16": (NotingTask, AMPAddon),
    "two optimizers": (NotingGan,),
}
OPTIONS: dict[str, Any] = {
    "windows of bf16": {"precision": "bf16", "gradient_accumulation_steps": 2},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_is_logged_and_nothing_is_clipped(way: str) -> None:
    """Bitwise the weights of a run without it; the norms are those of the true gradients, after unscaling."""
    without, measured = (train(*WAYS[way], clip=clip, **OPTIONS.get(way, {})) for clip in (0.0, math.inf))
    assert digest(measured.model) == digest(without.model)
    assert without.noted == measured.noted
    assert without.grad_norm is None
    assert not any("grad_norm" in row for row in without.log_history)
    rows = [row for row in measured.log_history if "lr" in row or "lr/generator" in row]
    assert len(rows) == measured.progress_checker.step == len(measured.noted) > 2
    for row, norm in zip(rows, measured.noted, strict=True):
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5) or not math.isfinite(norm)
        if way == "two optimizers":
            assert math.hypot(row["grad_norm/generator"], row["grad_norm/critic"]) == pytest.approx(norm, rel=1e-5)
            assert {"lr/generator", "lr/critic"} <= row.keys()


def test_a_resumed_run_logs_the_same(tmp_path: Path) -> None:
    """Interrupted after the last step of an epoch, whose record is then still to be made."""
    rows = []
    for stops in (False, True):
        folder = tmp_path / str(stops)
        for steps in (5, 10) if stops else (10,):
            model = Gan()
            trainer = GanTask.add_on(StateManagerAddon)(
                model, "cpu", optimizer=model.optimizers(), gradient_clip=math.inf, log_bar=False, save_path=folder,
                resume="auto",
            )  # fmt: skip
            trainer.run(2 if steps == 10 else None, BATCHES, max_steps=steps)
        rows.append(trainer.log_history)
    assert [sorted(row) for row in rows[0]] == [sorted(row) for row in rows[1]]
    assert all("grad_norm/critic" in row for row in rows[1])


def test_a_gradient_that_is_not_finite_is_found() -> None:
    """In its own step, as with a limit; without a norm it is in the loss of the next."""

    class Infinite(Task):
        def backward(self, loss: Tensor, **kwargs: Any) -> None:
            super().backward(loss, **kwargs)
            next(self.model.parameters()).grad.fill_(math.inf)

    with pytest.raises(NonFiniteError, match=r"step 1 .* gradient norm inf"):
        train(Infinite, clip=math.inf)
    with pytest.raises(NonFiniteError, match=r"step 2 .* loss nan"):
        train(Infinite, clip=0.0)


@pytest.mark.parametrize("given", [math.nan, -math.inf, "inf", True, None])
def test_what_is_not_a_norm_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"gradient_clip=.*must be a number of at least 0"):
        train(Task, clip=given)
