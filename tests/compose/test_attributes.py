"""An attribute of the user's that a trainer reads under the same name is refused, with its name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from zae import ConfigError, TaskError, Trainer

BATCHES = [torch.ones(4, 2)] * 4


class Task(Trainer):
    """Sets an attribute in its ``__init__``, before or after the trainer's, or in a step."""

    def __init__(self, *args: Any, sets: Any = (), **options: Any) -> None:
        super().__init__(*args, **options)
        for name, value in sets:
            setattr(self, name, value)

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def make(*sets: Any, cls: Any = Task, **options: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, sets=sets, **options)


OPTIONS = {"seed": 7, "gradient_clip": 0.5, "monitor": "accuracy", "log_every": 5, "log_bar": "lines"}
OTHERS = {
    "history": [], "best": {}, "log_train": [], "log_test": {}, "train_metrics": {}, "test_metrics": {},
    "train_history": [], "valid_history": [], "log_history": [], "grad_norm": 0.0,
    "engine": None, "devices": [], "optimizers": [], "schedulers": {},
}  # fmt: skip
READ_ONLY = {"metrics": {}, "valid_name": "first", "rank": 3, "world_size": 2, "is_main": True, "should_stop": True}


@pytest.mark.parametrize(("name", "value"), [*OPTIONS.items(), *OTHERS.items()])
def test_a_name_of_the_trainer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        TaskError, match=rf"Task.__init__ sets self.{name}, which the trainer keeps for itself"
    ) as caught:
        make((name, value))
    assert (f"super().__init__(..., {name}=...)" in str(caught.value)) == (name in OPTIONS)
    assert make(("own_name", value)).run(1, BATCHES)["step"] == 4


@pytest.mark.parametrize(("name", "value"), READ_ONLY.items())
def test_a_property_that_cannot_be_set_is_named_by_python(name: str, value: Any) -> None:
    with pytest.raises(AttributeError, match=f"property '{name}' of .* has no setter"):
        make((name, value))


@pytest.mark.parametrize("name", ["seed", "gradient_clip", "monitor", "log_bar", "mode"])
def test_the_value_that_is_there_may_be_set_again(name: str) -> None:
    make((name, getattr(make(), name)))


def test_a_mode_is_one_of_two() -> None:
    for value in ("pretrain", None, 1):
        with pytest.raises(ConfigError, match=rf"mode={value!r}; .* 'train' or 'test'.*another name"):
            make(("mode", value))
    trainer = make()
    trainer.run(1, BATCHES)
    with pytest.raises(ConfigError, match=r"mode='pretrain'"):
        trainer.mode = "pretrain"
    trainer.mode = "test"
    assert trainer.run(1, BATCHES)["valid_metrics_history"]
    assert (copy.deepcopy(trainer).mode, pickle.loads(pickle.dumps(trainer)).mode) == ("test", "test")


def test_a_mode_in_the_class_is_refused() -> None:
    with pytest.raises(TaskError, match=r"Phased.mode = 'pretrain' hides the trainer's property 'mode'"):
        type(Task)("Phased", (Task,), {"mode": "pretrain"})


def test_an_attribute_error_of_the_users_own_stays_its_own() -> None:
    class Own:
        @property
        def fixed(self) -> int:
            return 1

    class Sets(Task):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            Own().fixed = 2  # type: ignore[misc]

    with pytest.raises(AttributeError, match="fixed") as caught:
        make(cls=Sets)
    assert not hasattr(caught.value, "__notes__")
