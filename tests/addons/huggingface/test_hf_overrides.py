"""Classes that override methods of transformers.Trainer: the same weights with HuggingFaceAddon, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kit import hf
from zae import Trainer, replaces
from zae.addons import CallbackAddon, HuggingFaceAddon, StateManagerAddon
from zae.addons.huggingface.overrides import NOT_CALLED
from zae.errors import AddOnConflict, ConfigError, TaskError

Task = Trainer.add_on(HuggingFaceAddon)


def groups(base: Any) -> Any:
    """Another rate for the head; the attribute is set, and nothing returned."""

    class Ours(base):
        def create_optimizer(self) -> Any:
            if self.optimizer is None:
                head = list(self.model.classifier.parameters())
                rest = [each for name, each in self.model.named_parameters() if not name.startswith("classifier")]
                groups = [{"params": head, "lr": 0.3}, {"params": rest}]
                self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate)

    return Ours


def doubles(base: Any) -> Any:
    """The optimizer of Transformers, changed."""

    class Ours(base):
        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer(model)
            optimizer.param_groups[1]["lr"] *= 2
            return optimizer

    return Ours


def falls(base: Any) -> Any:
    """A schedule of one's own."""

    class Ours(base):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            optimizer = self.optimizer if optimizer is None else optimizer
            length = 2 * num_training_steps
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)
            return self.lr_scheduler

    return Ours


def longer(base: Any) -> Any:
    """The schedule of Transformers, as if the run were longer."""

    class Ours(base):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return super().create_scheduler(2 * num_training_steps, optimizer)

    return Ours


def momentum(base: Any) -> Any:
    """Another class of optimizers."""

    class Ours(base):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.9}

    return Ours


def decays_all(base: Any) -> Any:
    """Weight decay of biases and norms too."""

    class Ours(base):
        def get_decay_parameter_names(self, model: Any) -> Any:
            return [name for name, _ in model.named_parameters()]

    return Ours


def all_four(base: Any) -> Any:
    return doubles(longer(momentum(decays_all(base))))


def train(kind: Any, *args: Any, **more: Any) -> Any:
    model = hf.make_model()
    trainer = kind(model, *args, train_dataset=hf.dataset(), **more)
    trainer.train()
    return model.state_dict()


def difference(one: Any, other: Any) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


SETTINGS = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1, "num_train_epochs": 2}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("overrides", [groups, doubles, falls, longer, momentum, decays_all, all_four])
def test_overrides_are_called_as_in_transformers(overrides: Any, tmp_path: Any) -> None:
    """With ``args``, and with the options by themselves; without the override, the weights are others."""
    args = hf.arguments(tmp_path, **SETTINGS)
    theirs = train(overrides(transformers.Trainer), args)
    ours = overrides(Task)
    assert difference(train(ours, args), theirs) <= 1e-6
    assert difference(train(ours, "cpu", **SETTINGS), theirs) <= 1e-6
    assert difference(train(Task, "cpu", **SETTINGS), theirs) > 1e-4


@pytest.mark.parametrize("overrides", [groups, falls, momentum, decays_all])
def test_a_class_that_the_add_on_is_put_on(overrides: Any) -> None:
    inside = overrides(Trainer).add_on(HuggingFaceAddon)
    outside = overrides(Task)
    assert difference(train(inside, "cpu", **SETTINGS), train(outside, "cpu", **SETTINGS)) == 0


def test_a_plan_and_a_resume_have_the_schedule_of_the_override(tmp_path: Any) -> None:
    """A plan neither makes the optimizer of the run nor changes a weight."""
    ours = doubles(falls(Task)).add_on(StateManagerAddon)
    options = {"save_path": tmp_path, "save_every": 1, "log_every": 1, "resume": "auto", **SETTINGS}
    trainer = ours(hf.make_model(), "cpu", train_dataset=hf.dataset(), **options)
    assert "lr/1       0.2 at step 1, 0.1833 at step 2" in str(trainer.plan(2, trainer.get_train_dataloader()))
    assert difference(trainer.model.state_dict(), hf.make_model().state_dict()) == 0
    trainer.train()
    rates = [row["lr"] for row in trainer.log_history]
    assert rates[-1] == pytest.approx(0.1 * (1 - 6 / 12))
    resumed = ours(hf.make_model(), "cpu", train_dataset=hf.dataset(), **options)
    resumed.train()
    assert [row["lr"] for row in resumed.log_history] == rates


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_would_not_be_called_is_refused(name: str) -> None:
    """When the class is made, whichever way it gets the add-on; without the add-on it is the class's own method."""
    override = {name: lambda self, *args: None}
    with pytest.raises(TaskError, match=rf"Mine.{name} would never be called.*Write \w"):
        type("Mine", (Task,), override)
    own = (
        type("Mine", (Trainer,), override) if name not in ("training_step", "create_optimizer_and_scheduler") else None
    )
    if own is not None:
        with pytest.raises(TaskError, match=rf"Mine.{name} would never be called"):
            own.add_on(HuggingFaceAddon)


OF_THE_SCRIPT = {
    "add_callback",
    "get_learning_rates",
    "get_num_trainable_parameters",
    "get_optimizer_group",
    "metrics_format",
    "save_state",
    "pop_callback",
    "remove_callback",
    "end",
    "is_local_process_zero",
    "is_world_process_zero",
}
"""Methods that the script calls, and not ``transformers.Trainer`` itself."""


def test_each_method_of_the_installed_trainer_is_known() -> None:
    """It is here as well, or refused: a new version brings no override that is not called without a word."""
    methods = {name for name, value in vars(transformers.Trainer).items() if callable(value) and name[0] != "_"}
    assert NOT_CALLED.keys() <= methods
    assert {name for name in methods if name not in dir(Task)} == NOT_CALLED.keys() | OF_THE_SCRIPT


def test_what_is_given_beside_an_override_is_refused() -> None:
    model = hf.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ConfigError, match=r"optimizer=SGD\(...\) is given, and Ours has create_optimizer"):
        groups(Task)(model, "cpu", optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"scheduler=LambdaLR\(...\) is given, and Ours has create_scheduler"):
        falls(Task)(model, "cpu", optimizer=optimizer, scheduler=scheduler)


def test_a_mixin_without_super_is_led_to_the_mark() -> None:
    """Another name, as for any other collision, would never be called."""

    class Mixin:
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

    with pytest.raises(AddOnConflict, match=r"mark Mixin.get_decay_parameter_names with @zae.replaces, or call super"):
        type("Mine", (Mixin, Task), {})
    replaces(Mixin.get_decay_parameter_names)
    mine = type("Mine", (Mixin, Task), {})
    assert difference(train(mine, "cpu", **SETTINGS), train(decays_all(Task), "cpu", **SETTINGS)) == 0


@pytest.mark.parametrize("with_sets", [False, True])
def test_evaluations_in_training_call_an_override_of_evaluate(with_sets: bool, tmp_path: Any) -> None:
    """As Transformers does; what it adds is recorded, and may be what is monitored."""

    def evaluates(base: Any) -> Any:
        class Evaluates(base):  # type: ignore[misc]
            calls = 0

            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                metrics: dict[str, float] = super().evaluate(*args, **kwargs)
                self.calls += 1
                return {**metrics, "eval_calls": float(self.calls)}

        return Evaluates

    data = {"one": hf.dataset(count=5), "two": hf.dataset(count=9)} if with_sets else hf.dataset(count=5)
    settings = {"eval_strategy": "epoch", "metric_for_best_model": "calls", "greater_is_better": True, **SETTINGS}
    args = hf.arguments(tmp_path, **settings)
    theirs = evaluates(transformers.Trainer)(hf.make_model(), args, train_dataset=hf.dataset(), eval_dataset=data)
    theirs.train()
    ours = evaluates(Task.add_on(CallbackAddon))(hf.make_model(), args, train_dataset=hf.dataset(), eval_dataset=data)
    ours.train()
    if not with_sets:  # Of several, Transformers evaluates each by a call of its own.
        assert [row["valid_calls"] for row in ours.history.valid] == [1, 2]
        assert ours.best["score"] == theirs.state.best_metric == 2
    names = ["eval_one_loss", "eval_two_loss"] if with_sets else ["eval_loss"]
    for name in names:
        rows = [row[name] for row in theirs.state.log_history if name in row]
        assert [row[name] for row in ours.state.log_history if name in row] == pytest.approx(rows, abs=1e-6)
