"""What a step may return and log; anything else is refused at the first batch, with nothing half done."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kit.hand import digest
from kit.refusals import Bare, InADict, Task, loader, make, mse, stepping, unchanged
from zae import StepError
from zae.addons import AMPAddon, CompileAddon, EMAAddon, GradientAccumulationAddon, JSONLLoggerAddon

OUTPUTS = {
    "None": (lambda self, b: None, r"returned None; return a dict"),
    "a vector alone": (lambda self, b: self.model(b[0]), r"returned Tensor of shape \(8, 1\)"),
    "a tuple": (lambda self, b: (mse(self, b), 1), "returned tuple of 2 entries; return a dict"),
    "no loss": (lambda self, b: {"output": 1, "acc": 2}, r"without 'loss'; its keys are 'output', 'acc'; return"),
    "an empty dict": (lambda self, b: {}, "its keys are none"),
    "los": (lambda self, b: {"los": mse(self, b)}, "rename 'los' to 'loss'"),
    "a float": (lambda self, b: {"loss": mse(self, b).item()}, r"loss of type float; return the tensor, with"),
    "None as loss": (lambda self, b: {"loss": None}, "loss of type NoneType"),
    "a vector": (lambda self, b: {"loss": self.model(b[0])}, r"loss of shape \(8, 1\); reduce it to a scalar: l"),
    "detached": (lambda self, b: {"loss": mse(self, b).detach()}, r"requires_grad=False; compute it from self\.model"),
    "an array": (lambda self, b: {"loss": mse(self, b).detach().numpy()}, "a loss of type (ndarray|float32)"),
    "several": (lambda self, b: {"loss": {"a": mse(self, b)}}, r"losses for \['a'\], but the optimizers are \['0'\]"),
    "text targets": (lambda self, b: {"loss": mse(self, b), "num_targets": "eight"}, "num_targets 'eight'; return"),
    "all targets": (lambda self, b: {"loss": mse(self, b), "num_targets": b[1]}, r"num_targets of shape \(8, 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("add_ons", [(), (AMPAddon, GradientAccumulationAddon, EMAAddon)], ids=["plain", "composed"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_train_step_returns(kind, add_ons):
    """At that step, with the batch's shapes, and the weights of before."""
    step, match = OUTPUTS[kind]
    trainer = make(stepping(step).add_on(*add_ons))
    with pytest.raises(StepError, match=match), unchanged(trainer):
        trainer.run(1, loader())


@pytest.mark.parametrize("count", ["eight", -1, float("nan"), float("inf"), torch.ones(2), torch.tensor(-3)], ids=str)
@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,)], ids=["plain", "composed"])
def test_a_count_of_targets_that_is_none(count, add_ons):
    """In training and in evaluation, before a mean is made of it."""
    step = lambda self, batch: {"loss": mse(self, batch), "num_targets": count}  # noqa: E731
    trainer = make(stepping(step).add_on(*add_ons))
    message = r"Task.*\.train_step \(batch: .*\) returned num_targets .*; return the number of targets"
    with pytest.raises(StepError, match=message), unchanged(trainer):
        trainer.run(1, loader())
    trainer = make(stepping(step, "test_step").add_on(*add_ons))
    message = r"Task.*\.test_step returned num_targets .*; return the number of targets"
    with pytest.raises(StepError, match=message), unchanged(trainer):
        trainer.evaluate(loader())


def test_names_the_batch_and_the_place():
    """Shapes and types in the text, the place in a note, and later steps are no different from the first."""

    def late(self, batch):
        return {"loss": mse(self, batch)} if self.progress_checker.step < 2 else None

    trainer = make(stepping(late))
    with pytest.raises(
        StepError, match=r"Task.train_step \(batch: list\(Tensor\[8, 3\] float32, Tensor\[8, 1\] flo"
    ) as caught:
        trainer.run(1, loader())
    assert caught.value.__notes__ == [
        "zae: in epoch 1, step 3 (batch 3), on cpu; the batch was list(Tensor[8, 3] float32, Tensor[8, 1] float32)"
    ]
    assert trainer.progress_checker.step == 2


@pytest.mark.parametrize("out", [None, "0.5", torch.zeros(2), (1, 2), [{}]], ids=str)
def test_what_test_step_returns(out):
    trainer = make(stepping(lambda self, batch: out, "test_step"))
    for call in (trainer.evaluate, trainer.inference):
        message = r"Task.test_step \(batch: .*\) returned .*; return a dict"
        with pytest.raises(StepError, match=message), unchanged(trainer):
            call(loader())


def test_extra_outputs():
    """Numbers are averaged, all else is kept; nothing fails at the end of the epoch."""
    seen = {}

    def step(self, batch):
        return {
            "loss": mse(self, batch),
            "text": "hello",
            "array": np.ones(3),
            "number": np.float32(2.0),
            "nested": {"a": 1, "b": {"c": torch.tensor(3.0)}},
            "output": self.model(batch[0]),
            "none": None,
            "list": [1, 2],
            "flag": True,
            "object": object(),
            7: 1.0,
        }

    def metric_on_epoch_end(self):
        log = self.log_train if self.mode == "train" else self.log_test
        seen[self.mode] = {key: list(log[key]) for key in log}
        return {"outputs": float(torch.cat(log["output"]).numel())}

    cls = type(Task)(
        "Task", (Task,), {"train_step": step, "test_step": step, "metric_on_epoch_end": metric_on_epoch_end}
    )
    trainer = make(cls, keep_train_outputs=True)
    metrics = trainer.run(2, loader(), loader())
    row = metrics["train_metrics_history"][-1]
    assert (row["train_number"], row["train_nested/a"], row["train_nested/b/c"], row["train_flag"]) == (2, 1, 3, 1)
    assert row["train_outputs"] == 24
    assert seen["train"]["text"] == ["hello"] * 3
    assert seen["test"]["array"][0].tolist() == [1, 1, 1]
    assert not any(o.requires_grad for o in seen["train"]["output"])


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (0.5, r"metric_on_epoch_end returned float 0.5; return a dict of numbers"),
        ([("a", 1)], r"metric_on_epoch_end returned list of 1 entries; return a dict of numbers"),
        ({"confusion": torch.eye(2)}, r"returned 'confusion' of type Tensor of shape \(2, 2\); return a number"),
        ({"name": "best"}, "returned 'name' of type str 'best'; return a number"),
    ],
)
def test_what_metric_on_epoch_end_returns(returned, match):
    trainer = make(stepping(lambda self: returned, "metric_on_epoch_end"))
    with pytest.raises(StepError, match=match):
        trainer.run(1, loader())
    assert make(stepping(lambda self: None, "metric_on_epoch_end")).run(1, loader())["epoch"] == 1


@pytest.mark.parametrize(
    ("add_ons", "options"),
    [
        ((), {}),
        ((), {"gradient_clip": 0.1}),
        ((AMPAddon,), {"precision": "bf16"}),
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
        ((CompileAddon,), {"compile_backend": "eager"}),
    ],
)
def test_a_loss_alone_is_a_dict_with_it(add_ons, options):
    """In training, validation and inference, on every way through a step."""
    ends = []
    for task in (Bare, InADict):
        trainer = make(task.add_on(*add_ons), **options)
        metrics = trainer.run(2, loader(), loader())
        ends.append((digest(trainer.model), str(metrics), trainer.inference(loader())))
    assert str(ends[0]) == str(ends[1])


@pytest.mark.parametrize("number", [0.5, 1, np.float32(2.0), torch.tensor(3.0)])
def test_a_number_alone_is_the_loss_of_a_test_step(number):
    class Counting(InADict):
        def test_step(self, batch):
            return number

    assert make(Counting).evaluate(loader()) == {"loss": float(number)}


@pytest.mark.parametrize("wrong", [None, "loss", [1.0], torch.ones(2), 0.5])
def test_what_is_neither_is_refused(wrong):
    class Wrong(InADict):
        def train_step(self, batch):
            return wrong

        def test_step(self, batch):
            return None if isinstance(wrong, float) else wrong

    with pytest.raises(StepError, match=r"Wrong.train_step .*return a dict: return {'loss': loss}"):
        make(Wrong).run(1, loader())
    with pytest.raises(StepError, match=r"Wrong.test_step .*return a dict: return {'loss': loss}"):
        make(Wrong).evaluate(loader())


@pytest.mark.parametrize("add_ons", [(), (JSONLLoggerAddon,)])
def test_logging_a_number_by_name(add_ons):
    """The most written line of Lightning, with and without its further arguments."""
    options = {"jsonl_path": "log.jsonl"} if add_ons else {}

    class ByName(InADict):
        more: dict[str, bool] = {}

        def train_step(self, batch):
            self.log("accuracy", 0.5, **self.more)
            return super().train_step(batch)

    with pytest.raises(StepError, match=r"return it from the step: return {'loss': loss, 'accuracy': value}"):
        make(ByName.add_on(*add_ons), **options).run(1, loader())
    ByName.more = {"prog_bar": True}
    with pytest.raises(TypeError) as caught:
        make(ByName.add_on(*add_ons), **options).run(1, loader())
    assert "return it from the step: return {'loss': loss, 'x': value}" in caught.value.__notes__[0]
