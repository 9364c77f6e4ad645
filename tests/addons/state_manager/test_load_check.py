"""What cannot be saved, or not be resumed from, is refused after the first step, with what to write instead."""

from __future__ import annotations

import enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, MultiplicativeLR, StepLR

from kit import hand
from kit.ranks import on_ranks
from zae import AddOnBase, CheckpointError, CheckpointMismatch, Every, Trainer
from zae.addons import MultiGPUAddon, StateManagerAddon


class Classifier(Trainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


def build(folder: Path, *add_ons: type, cls: type = Classifier, **options: Any) -> Any:
    """Return a trainer that saves at the end of each epoch of six steps."""
    task: Any = cls
    options = {"optimizer": lambda p: AdamW(p, lr=0.01), "seed": 0, "log_bar": False, **options}
    return task.add_on(*add_ons, StateManagerAddon)(hand.network, "cpu", save_path=folder, **options)


def refuse(trainer: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        trainer.run(2, hand.loader())
    assert trainer.progress_checker.step == 1
    assert not list(trainer.save_path.glob("*"))


# ----------------------------------------------------------------------------------------------------------- schedulers


class WarmUp(LRScheduler):
    """As in many repositories: a scheduler in a scheduler."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [rate * min(1.0, (self.last_epoch + 1) / 4) for rate in self.base_lrs]


class Forgets(StepLR):
    """Saves something that it does not load."""

    def __init__(self, optimizer: Any) -> None:
        self.seen = 0
        super().__init__(optimizer, 3)

    def step(self, epoch: Any = None) -> None:
        self.seen += 1
        super().step(epoch)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({key: each for key, each in state_dict.items() if key != "seen"})


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (
            lambda o: WarmUp(o, StepLR(o, 3)),
            r"scheduler\['0'\]\['after'\] is a .*StepLR; .* return its state_dict\(\) in",
        ),
        (
            Forgets,
            r"would not load .*scheduler Forgets does not load its own state: scheduler\['seen'\] was 2 and is 1",
        ),
    ],
    ids=["in another one", "forgets"],
)
def test_a_scheduler_that_cannot_be_resumed(scheduler: Any, said: str, tmp_path: Path) -> None:
    refuse(build(tmp_path, scheduler=scheduler, scheduler_step_on_batch=True), said)


# ----------------------------------------------------------------------------------------------------------- optimizers


class Kept(SGD):
    """Keeps something beside the state of torch, as wrappers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.kept: Any = None

    def step(self, closure: Any = None) -> Any:
        self.kept = torch.ones(2)
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "kept": self.kept}


class Drops(Kept):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({key: each for key, each in state_dict.items() if key != "kept"})


class Doubles(Kept):
    """Changes in place what it is given; the run's own tensors stay as they are."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.kept = state_dict.pop("kept").mul_(2)
        super().load_state_dict(state_dict)


class Sharpness(SGD):
    """Steps with another optimizer, as implementations of SAM do, whose momentum it does not save."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.base = SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Views(SGD):
    """Keeps a flat tensor, and a part of it."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            flat = torch.zeros(parameter.numel() + 1)
            self.state[parameter] = {"flat": flat, "part": flat[1:]}
        return super().step(closure)


class Norm(enum.Enum):
    SIGN = "sign"


class InState(SGD):
    """Keeps a member of an Enum where a new optimizer has nothing to compare it with."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["norm"] = Norm.SIGN
        return super().step(closure)


class Projector:
    """An object of a class of its own."""


class HasObject(SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["projector"] = Projector()
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            Sharpness,
            r"\(Sharpness\) does not save all of its state: the state of the SGD in it\['state'\] was ",
        ),
        (Drops, r"optimizer Drops does not load its own state: .*\['kept'\] was a tensor .* and is None"),
        (Doubles, r"does not load its own state: .*\['kept'\] was .*\[1.0, 1.0\] and is .*\[2.0, 2.0\]"),
        (Views, r"\['flat'\] and .*\['part'\] of Views are views of the same memory, .* keep one of them"),
        (InState, r"\['norm'\] was <Norm.SIGN: 'sign'> and is 'sign'"),
        (HasObject, r"\['projector'\] is a .*Projector; a checkpoint holds only"),
    ],
)
def test_an_optimizer_that_cannot_be_resumed(kind: Any, said: str, tmp_path: Path) -> None:
    optimizer = (lambda p: kind(p)) if issubclass(kind, (Kept, Sharpness)) else (lambda p: kind(p, lr=0.1))
    refuse(build(tmp_path, optimizer=optimizer), said)


# ------------------------------------------------------------------------------------------ groups that training adds


class Thaws(Classifier):
    """Trains the last layer, and the first one too from the second epoch on."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1 and len(self.optimizer.param_groups) == 1:
            added = {"params": list(self.model[0].parameters()), "lr": 0.01, "initial_lr": 0.01}
            self.optimizer.add_param_group(added)
            for schedule in [self.scheduler, *getattr(self.scheduler, "_schedulers", ())]:
                for name in ("base_lrs", "lr_lambdas", "_last_lr"):
                    values = getattr(schedule, name, None)
                    if values is not None:
                        values.append(0.01 if name != "lr_lambdas" else self.lambda_of_added(values))

    def lambda_of_added(self, values: list[Any]) -> Any:
        return values[0]


class ThawsByAnotherRule(Thaws):
    def lambda_of_added(self, values: list[Any]) -> Any:
        return lambda step: 0.5


def decay(step: int) -> float:
    return 0.9**step


def of_last_layer(model: nn.Module) -> AdamW:
    return AdamW(model[-1].parameters(), lr=0.05)  # type: ignore[index]


SCHEDULES = {
    "LambdaLR": lambda o: LambdaLR(o, decay),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.9),
    "a partial, as those of Transformers": lambda o: LambdaLR(o, partial(decay)),
    "in another one": lambda o: ChainedScheduler([LambdaLR(o, decay), StepLR(o, 3)]),
    "StepLR": lambda o: StepLR(o, 3),
}


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_group_that_training_adds_resumes_with_its_schedule(schedule: Any, tmp_path: Path) -> None:
    ends = []
    for folder, limits in (("straight", (None,)), ("resumed", (8, None))):
        for limit in limits:
            trainer = build(
                tmp_path / folder, cls=Thaws, optimizer=of_last_layer, scheduler=schedule,
                scheduler_step_on_batch=True, resume="auto",
            )  # fmt: skip
            trainer.run(3, hand.loader(), max_steps=limit)
        ends.append((hand.digest(trainer.unwrap()), trainer.optimization.learning_rates()))
    assert ends[0] == ends[1]


def test_a_group_whose_schedule_would_not_load_is_refused_when_it_is_added(tmp_path: Path) -> None:
    trainer = build(
        tmp_path, cls=ThawsByAnotherRule, optimizer=of_last_layer, scheduler=lambda o: LambdaLR(o, [decay]),
        scheduler_step_on_batch=True, save_every=Every(epochs=9),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"scheduler 0 \(LambdaLR\) has got a function in lr_lambdas"):
        trainer.run(3, hand.loader())
    assert trainer.progress_checker.step == 7, "the first step with the group"


# ----------------------------------------------------------------------------------------------------- after each load


def test_what_a_load_loses_is_refused_by_its_name(tmp_path: Path) -> None:
    """The code of a class may have changed since its state was saved; nothing is loaded then."""

    class Loads(Kept):
        def load_state_dict(self, state_dict: Any) -> None:
            self.kept = state_dict["kept"]
            super().load_state_dict({key: each for key, each in state_dict.items() if key != "kept"})

    build(tmp_path, optimizer=lambda p: Loads(p)).run(1, hand.loader())
    trainer = build(tmp_path, optimizer=lambda p: Drops(p), resume=True)
    trainer.optimizer = lambda p: type("Loads", (Drops,), {})(p)
    begun = hand.digest(trainer.unwrap())
    with pytest.raises(
        CheckpointMismatch, match=r"Loads does not load its own state: optimizer\['kept'\] was a tensor"
    ):
        trainer.run(2, hand.loader())
    assert hand.digest(trainer.unwrap()) == begun


# ------------------------------------------------------------------------------------------------ the rest of the state


class KeepsEnum(Classifier):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "phase": Norm.SIGN}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict({key: each for key, each in state.items() if key != "phase"}, strict)


class KeepsTask(AddOnBase):
    """Keeps an object of its own class."""

    layer = "observe"
    state_attributes = ("kept",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = {"projector": Projector()}


class OnlySaves(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}


def test_a_state_that_would_come_back_as_another_one(tmp_path: Path) -> None:
    refuse(
        build(tmp_path, cls=KeepsEnum), r"come back as another one: phase was <Norm.SIGN: 'sign'> and is 'sign'. Let"
    )
    refuse(build(tmp_path, KeepsTask), r"KeepsTask\['kept'\]\['projector'\] is a .*Projector")


def test_extra_state_that_nothing_loads(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.model.append(OnlySaves(trainer.model[-1].out_features, 2))
    refuse(trainer, r"\(OnlySaves\) has get_extra_state\(\) and no set_extra_state\(\)")


class Changes(nn.Module):
    """Gives a buffer another form in its forward, or makes a layer there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.fresh: Any = None
        self.register_buffer("kept", None if how == "is made" else torch.ones(3), persistent=how != "is not saved")

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how == "makes a layer":
            self.fresh = self.fresh or nn.Linear(inputs.shape[1], inputs.shape[1])
            return self.fresh(inputs)
        if self.how == "is another type":
            self.kept = self.kept.double()
        elif self.training:
            self.kept = torch.ones(4)
        return inputs


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("grows", r"0\.kept of the model was \(3,\) and is \(4,\) in the first step"),
        ("is another type", r"0\.kept of the model was torch\.float32 and is torch\.float64 in the first step"),
        ("is made", r"0\.kept of the model was made in the first step"),
        ("makes a layer", r"0\.fresh\.weight of the model was made in the first step"),
    ],
)
def test_a_model_that_the_first_step_changes(how: str, said: str, tmp_path: Path) -> None:
    """The model of a script that is started again would take no checkpoint of it."""
    trainer = build(tmp_path)
    trainer.model.insert(0, Changes(how))
    refuse(trainer, said)


class Prepares(Classifier):
    """Brings the model to the form that was saved."""

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.model[0].kept = torch.ones(4)
        super().load_state_dict(state, strict)


@pytest.mark.parametrize(("how", "cls"), [("is not saved", Classifier), ("grows", Prepares)])
def test_a_model_that_the_first_step_changes_and_that_can_be_resumed(how: str, cls: Any, tmp_path: Path) -> None:
    """What the refusal names is done."""
    for steps in (7, 12):
        trainer = build(tmp_path, cls=cls, resume="auto")
        trainer.model.insert(0, Changes(how))
        trainer.run(2, hand.loader(), max_steps=steps)
    assert trainer.progress_checker.step == 12


@pytest.mark.parametrize("kind", ["sparse", "quantized"])
def test_a_buffer_without_bytes_of_its_own(kind: str, tmp_path: Path) -> None:
    trainer = build(tmp_path, save_format="ckpt")
    values = torch.eye(3)
    buffer = values.to_sparse() if kind == "sparse" else torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    trainer.model[0].register_buffer("odd", buffer)
    refuse(trainer, r"0\.odd of the model is a Tensor .* which has no bytes to store; store the dense tensor")


# ------------------------------------------------------------------------------------------------- what it leaves alone


class Counts(Classifier):
    """Draws, and notes after which steps its state is read."""

    def state_dict(self) -> Any:
        vars(self).setdefault("read", []).append(self.progress_checker.step)
        if self.progress_checker.step == 1:
            torch.rand(3)
        return super().state_dict()


def test_it_is_tried_once_and_draws_nothing(tmp_path: Path) -> None:
    plain = Classifier(hand.network, "cpu", optimizer=lambda p: AdamW(p, lr=0.01), seed=0, log_bar=False)
    plain.run(2, hand.loader(shuffle=True))
    trainer = build(tmp_path, cls=Counts, save_every=Every(epochs=9))
    trainer.run(2, hand.loader(shuffle=True))
    assert trainer.read.count(1) == 1, "after the first step, before any save"
    assert hand.digest(trainer.unwrap()) == hand.digest(plain.unwrap())
    resumed = build(tmp_path, cls=Counts, save_every=Every(epochs=9), resume=True)
    resumed.run(3, hand.loader(shuffle=True))
    assert 13 not in resumed.read, "a run that was resumed has loaded its state"


def test_a_step_that_was_left_out_is_not_tried(tmp_path: Path) -> None:
    """A loss scale is found in the first steps, which change nothing: there is no state of the optimizer yet."""

    class Skips(Classifier):
        def train_step(self, batch: Any) -> Any:
            loss = super().train_step(batch)["loss"]
            return {"loss": loss * (float("nan") if self.progress_checker.step < 2 else 1.0)}

    trainer = build(tmp_path, cls=Skips, optimizer=HasObject, on_nonfinite="skip")
    trainer.optimization.optimizer = lambda p: HasObject(p, lr=0.1)
    with pytest.raises(CheckpointError, match="Projector"):
        trainer.run(2, hand.loader())
    assert trainer.progress_checker.step == 3


@on_ranks(2)
def test_of_several_ranks_each_tries_what_it_has(world: int, tmp_path: Path) -> None:
    class OnOne(Classifier):
        def state_dict(self) -> Any:
            kept = Norm.SIGN if self.rank == 1 else "sign"
            return {**super().state_dict(), "phase": kept}

    trainer = build(tmp_path, MultiGPUAddon, cls=OnOne)
    with pytest.raises(CheckpointError, match=r"phase was <Norm.SIGN: 'sign'>"):
        trainer.run(1, hand.loader())
    assert trainer.progress_checker.step == 1
