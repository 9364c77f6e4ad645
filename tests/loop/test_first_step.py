"""The first step of a run finds what a loop by hand leaves in train_step, before the optimizer has moved a weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from zae import StepError, TaskError, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon

BATCHES = list(torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0)))


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class ZeroGrad(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        self.optimizer.zero_grad()
        return super().train_step(batch)


class ZeroGradInPlace(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=False)
        return super().train_step(batch)


class Backward(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        out["loss"].backward(retain_graph=True)
        return out


class BackwardOfTheModel(Task):
    """Its loss is of another forward."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        super().train_step(batch)["loss"].backward()
        return super().train_step(batch)


class Steps(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        loss = super().train_step(batch)["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return super().train_step(batch)


def make(cls: Any, *add_ons: Any, optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    own = optimizer(model.parameters(), lr=0.1)
    return cls.add_on(*add_ons)(model, "cpu", optimizer=own, log_bar=False, **options)


IN_A_WINDOW = {"gradient_accumulation_steps": 4}
IDIOMS = [
    (Backward, (), {}, "has changed gradients itself"),
    (Backward, (GradientAccumulationAddon,), IN_A_WINDOW, "has changed gradients itself"),
    (BackwardOfTheModel, (), {}, "has changed gradients itself"),
    (Steps, (), {}, "steps an optimizer itself"),
    (Steps, (GradientAccumulationAddon, EMAAddon), {**IN_A_WINDOW, "decay": 0.9}, "steps an optimizer itself"),
    (Backward, (AMPAddon,), {"precision": "bf16"}, "has changed gradients itself"),
    (ZeroGrad, (GradientAccumulationAddon,), IN_A_WINDOW, "has removed the gradients of the batches before"),
    (ZeroGradInPlace, (GradientAccumulationAddon,), IN_A_WINDOW, "has changed gradients itself"),
]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(("cls", "add_ons", "options", "cause"), IDIOMS)
def test_an_idiom_of_a_loop_by_hand_ends_the_first_step(
    cls: Any, add_ons: Any, options: Any, cause: str, optimizer: Any
) -> None:
    trainer = make(cls, *add_ons, optimizer=optimizer, **options)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(
        StepError, match=rf"{cls.__name__}.*\.train_step .* are done for you: it {cause}.*; take them out"
    ):
        trainer.run(1, BATCHES)
    assert all(torch.equal(before[name], each) for name, each in trainer.model.state_dict().items())
    assert not trainer.optimizer._optimizer_step_pre_hooks
    assert "backward" not in vars(trainer)


@pytest.mark.parametrize("cls", [ZeroGrad, ZeroGradInPlace])
def test_zero_grad_in_a_step_of_one_batch_changes_nothing(cls: Any) -> None:
    ends = [make(each) for each in (Task, cls)]
    for trainer in ends:
        trainer.run(2, BATCHES)
    assert torch.equal(ends[0].model[0].weight, ends[1].model[0].weight)


class Penalty(Task):
    """Differentiates by its input, clamps its weights, and evaluates: none of it is a step."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            self.model[0].weight.clamp_(-1, 1)
        inputs = batch.clone().requires_grad_()
        loss = self.model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return {"loss": loss + gradient.square().sum()}


class TwoLosses(Task):
    """Has a second network with an optimizer of its own, which the trainer does not know."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        own = vars(self).setdefault("own", nn.Linear(3, 1))
        step = vars(self).setdefault("own_step", torch.optim.SGD(own.parameters(), lr=0.1))
        step.zero_grad()
        own(batch).square().mean().backward()
        step.step()
        return super().train_step(batch)


class Evaluating(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        self.evaluate(BATCHES[:2])
        return super().train_step(batch)


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon, AMPAddon, EMAAddon, MultiGPUAddon)], ids=len)
@pytest.mark.parametrize("cls", [Penalty, TwoLosses, Evaluating])
def test_what_is_right_is_not_refused(cls: Any, add_ons: Any) -> None:
    options = {"gradient_accumulation_steps": 4, "precision": "bf16", "decay": 0.9} if add_ons else {}
    assert make(cls, *add_ons, **options).run(1, BATCHES)["step"] == len(BATCHES) // (4 if add_ons else 1)


def test_each_call_and_each_resume_is_watched_anew(tmp_path: Any) -> None:
    class Later(Task):
        backward_from = 10

        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            if self.mode == "train" and self.progress_checker.step == self.backward_from:
                out["loss"].backward(retain_graph=True)
            return out

    trainer = make(Later, StateManagerAddon, save_path=tmp_path)
    trainer.run(1, BATCHES)
    Later.backward_from = 8
    with pytest.raises(StepError, match="has changed gradients itself"):
        trainer.run(1, BATCHES)
    again = make(Later, StateManagerAddon, save_path=tmp_path, resume="auto")
    again.run(1, BATCHES)
    with pytest.raises(StepError, match="has changed gradients itself"):
        again.run(1, BATCHES)


def test_a_step_by_hand_is_watched_too() -> None:
    trainer = make(Backward)
    with trainer.ready(), pytest.raises(StepError, match="has changed gradients itself"):
        trainer.run_batch(BATCHES[0])


class Forgetful(Task):
    def setup(self) -> None: ...


class Stopped(Task):
    """Its optimizers are not stepped."""

    def optimizer_step(self) -> bool:
        return True


def test_a_setup_without_super_is_named() -> None:
    with pytest.raises(TaskError, match=r"Forgetful.setup does not call super\(\).setup\(\)"):
        make(Forgetful).run(1, BATCHES)


def test_an_epoch_that_moves_no_weight_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    make(Stopped).run(3, BATCHES)
    said = [each for each in caplog.messages if "has changed no weight" in each]
    assert len(said) == 1
    assert "epoch 1 has changed no weight in 8 steps" in said[0]
    caplog.clear()
    make(Task).run(3, BATCHES)
    assert not [each for each in caplog.messages if "has changed no weight" in each]
