"""The first step of a run finds what a loop by hand leaves in train_step, before the optimizer has moved a weight."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from kit.ranks import on_ranks
from zae import StepError, TaskError, Trainer
from zae.addons import AMPAddon, EMAAddon, FSDPAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon

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


class BackwardOfANumber(Task):
    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        loss.backward()
        return {"loss": loss.item()}


class WholeLoop(Task):
    """Returns nothing."""

    def train_step(self, batch: Any) -> Any:
        super().train_step(batch)["loss"].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class Clips(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return super().train_step(batch)


class StepsScheduler(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        self.scheduler.step()
        return super().train_step(batch)


class StepsPlateau(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        self.scheduler.step(out["loss"].item())
        return out


def make(cls: Any, *add_ons: Any, optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    own = optimizer(model.parameters(), lr=0.1)
    if options.get("scheduler") is StepLR:
        options["scheduler"] = StepLR(own, 1)
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
    (
        Clips,
        (GradientAccumulationAddon,),
        IN_A_WINDOW,
        r"has changed gradients itself \(to clip them, write gradient_cl",
    ),
    (BackwardOfANumber, (), {}, "has changed gradients itself"),
    (BackwardOfANumber, (AMPAddon, EMAAddon), {"precision": "bf16", "decay": 0.9}, "has changed gradients itself"),
    (WholeLoop, (), {}, "has changed gradients itself"),
    (StepsScheduler, (), {"scheduler": StepLR}, "steps a scheduler, as the trainer does"),
    (StepsScheduler, (GradientAccumulationAddon,), {**IN_A_WINDOW, "scheduler": StepLR}, "steps a scheduler, as the"),
    (StepsScheduler, (), {"scheduler": StepLR, "scheduler_step_on_batch": True}, "steps a scheduler, as the trainer"),
    (
        StepsPlateau,
        (),
        {"scheduler": ReduceLROnPlateau, "monitor": "train/loss"},
        "steps a scheduler, as the trainer does",
    ),
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


class OwnSchedule(Task):
    """Steps the scheduler itself, instead of the trainer."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.mode == "train":
            self.scheduler.step()
        return super().train_step(batch)

    def scheduler_step(self, when: str) -> None: ...


class OwnRate(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.progress_checker.step)
        return super().train_step(batch)


class Evaluating(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        self.evaluate(BATCHES[:2])
        return super().train_step(batch)


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon, AMPAddon, EMAAddon, MultiGPUAddon)], ids=len)
@pytest.mark.parametrize("cls", [Penalty, TwoLosses, OwnSchedule, OwnRate, Evaluating])
def test_what_is_right_is_not_refused(cls: Any, add_ons: Any) -> None:
    options = {"gradient_accumulation_steps": 4, "precision": "bf16", "decay": 0.9} if add_ons else {}
    options["scheduler"] = StepLR
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
    with pytest.raises(TaskError, match=r"Forgetful.setup overrides a hook without calling super\(\)"):
        make(Forgetful).run(1, BATCHES)


class WithoutGraph(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            loss = self.model(batch).square().mean()
        return {"loss": loss.requires_grad_()}


class LeftInEvaluation(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        self.model.eval()
        return out


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (WithoutGraph, "epoch 1 has changed no weight in 8 steps: compute the loss from self.model(...)"),
        (LeftInEvaluation, "LeftInEvaluation.train_step leaves the model in evaluation mode"),
    ],
)
def test_what_trains_to_other_weights_is_warned_of_in_the_first_epoch(
    cls: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(cls).run(2, BATCHES)
    assert sum(said in each for each in caplog.messages) == 1


class WithPart(nn.Module):
    """Has a part that is trained and, as ``from_pretrained`` returns one, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))).eval()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def layer_alone(model: WithPart) -> None:
    model.body.train()
    model.body[1][0].eval()


@pytest.mark.parametrize(
    ("change", "is_named"),
    [
        (lambda model: None, True),
        (lambda model: model.train(), False),
        (lambda model: model.eval(), False),  # A run puts the whole model into training mode.
        (lambda model: model.body.requires_grad_(False), False),
        (layer_alone, False),
    ],
)
def test_a_part_that_is_trained_in_evaluation_mode_is_named(
    change: Any, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = WithPart()
    change(model)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    Task(model, "cpu", optimizer=optimizer).run(2, BATCHES)
    texts = [text for text in caplog.messages if "evaluation mode" in text]
    assert [text.startswith("body is trained in evaluation mode") for text in texts] == [True] * is_named
    assert all("model.train()" in text and "body[" not in text for text in texts)


class WithExtra(Task):
    """Has a module beside the model, and uses it in its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = nn.Linear(1, 1)

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.extra(self.model(batch)).square().mean()}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_module_of_the_task_that_no_optimizer_trains_is_named(
    is_frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    task = make(WithExtra)
    task.extra.requires_grad_(not is_frozen)
    task.run(2, BATCHES)
    texts = [text for text in caplog.messages if "self.extra" in text]
    assert len(texts) == (not is_frozen)


class LeftInTraining(Task):
    def test_step(self, batch: Any) -> dict[str, Any]:
        out = self.train_step(batch)
        self.model.train()
        return out


def test_a_test_step_that_leaves_the_model_in_training_mode_unfreezes_nothing() -> None:
    """Not a part of the model that the script has put into evaluation mode."""
    trainer = make(LeftInTraining)
    trainer.model[0].eval()
    trainer.run(2, BATCHES, BATCHES)
    assert [each.training for each in trainer.model.modules()] == [True, False, True, True]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {key: module(batch) for key, module in self.named_children()}


class TwoHeads(Trainer):
    """Which losses it returns decides which of two optimizers train."""

    keys: Any = ("a", "b")

    def train_step(self, batch: Any) -> dict[str, Any]:
        losses = {key: output.square().mean() for key, output in self.model(batch).items()}
        if self.keys == "a alone":
            return {"loss": losses["a"]}
        return {"loss": {key: losses[key] for key in self.keys}}

    test_step = train_step


def make_two(*add_ons: Any, cls: Any = TwoHeads) -> Any:
    model = Heads()
    optimizers = {key: torch.optim.SGD(module.parameters(), lr=0.1) for key, module in model.named_children()}
    return cls.add_on(*add_ons)(model, "cpu", optimizer=optimizers, log_bar=False)


@pytest.mark.parametrize(("keys", "idle"), [(("a", "b"), None), (("a",), "b"), (("b",), "a"), ("a alone", "b")])
def test_an_optimizer_that_no_loss_reaches_is_named_once(
    keys: Any, idle: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_two()
    trainer.keys = keys
    trainer.run(2, BATCHES)
    said = [each for each in caplog.messages if "has changed no weight" in each]
    assert len(said) == bool(idle)
    assert all(f"epoch 1 has changed no weight of optimizer {idle!r} in 8 steps" in each for each in said)


def test_an_epoch_that_moves_no_weight_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    make(Stopped).run(3, BATCHES)
    said = [each for each in caplog.messages if "has changed no weight" in each]
    assert len(said) == 1
    assert "epoch 1 has changed no weight in 8 steps" in said[0]
    caplog.clear()
    make(Task).run(3, BATCHES)
    assert not [each for each in caplog.messages if "has changed no weight" in each]


class Nan(Task):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": super().train_step(batch)["loss"] * float("nan")}


@pytest.mark.parametrize(("add_on", "option"), [(None, {"on_nonfinite": "skip"}), (AMPAddon, {"precision": "fp16"})])
def test_an_epoch_whose_steps_were_all_left_out_is_not_warned_of(
    add_on: Any, option: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Why no weight has moved is said by what left the steps out."""
    add_ons = [add_on] if add_on else []
    make(Nan, *add_ons, **{"on_nonfinite": "warn", **option}).run(1, BATCHES)
    assert not [each for each in caplog.messages if "has changed no weight" in each]


class OfOne(TwoHeads):
    keys = "a alone"


def said_by(trainer: Any) -> list[str]:
    """Return what a run of two epochs warns of weights that have not changed."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zae").addHandler(handler)
    try:
        trainer.run(2, BATCHES)
    finally:
        logging.getLogger("zae").removeHandler(handler)
    return [each for each in said if "has changed no weight" in each]


@on_ranks(2)
def test_an_idle_optimizer_is_named_where_its_weights_lie_in_parts(world: int) -> None:
    idle = said_by(make_two(FSDPAddon, cls=OfOne))
    assert len(idle) == (dist.get_rank() == 0)
    assert all("of optimizer 'b'" in each for each in idle)
    assert not said_by(make(Task, FSDPAddon))


def test_an_own_run_batch_is_called_once_for_each_batch() -> None:
    """The first step is watched within it: what it changes of the batch is changed once."""

    class Scales(Task):
        count = 0

        def run_batch(self, batch: Any) -> None:
            self.count += 1
            super().run_batch(2 * batch)

    def train(task: Any, batches: list[torch.Tensor]) -> Any:
        model = nn.Linear(3, 1)
        trainer = task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), log_bar=False)
        trainer.run(1, batches)
        return trainer

    torch.manual_seed(0)
    scaled = train(Scales, BATCHES)
    torch.manual_seed(0)
    by_hand = train(Task, [2 * batch for batch in BATCHES])
    assert scaled.count == len(BATCHES)
    assert torch.equal(scaled.model.weight, by_hand.model.weight)
