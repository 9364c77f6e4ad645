"""The direct way through a step: idle add-ons are passed by, and the rest takes fewer calls; nothing else."""

from __future__ import annotations

import copy
import pickle
import tempfile

import pytest
import torch

from zae import AddOnBase, StepError, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, MultiGPUAddon


class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


def make(cls, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options)


def batches(count=4):
    return list(torch.randn(count, 8, 2, generator=torch.Generator().manual_seed(0)))


class ScalingAddon(AddOnBase):
    """Scale the gradients, and note which of its seams were called."""

    layer = "loop"

    def __init__(self, *args, factor: float = 1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor
        self.called = []

    def is_idle(self):
        return self.factor == 1

    def setup(self):
        self.called.append("setup")
        super().setup()

    def clip(self):
        self.called.append("clip")
        super().clip()
        for parameter in self.parameters:
            parameter.grad *= self.factor


class CountingAddon(ScalingAddon):
    """Count the calls of zero_grad besides."""

    count = 0

    def zero_grad(self):
        super().zero_grad()
        self.count += 1


class ShiftingAddon(ScalingAddon):
    """Never idle, whatever its base says."""

    def is_idle(self):
        return False


def test_an_idle_add_on_is_called_around_the_step_only():
    trainer = make(Task.add_on(ScalingAddon))
    trainer.run(1, batches())
    assert trainer.called == ["setup"]
    trainer.factor = 0.5  # It is asked again by each run.
    trainer.run(1, batches())
    assert trainer.called == ["setup", "setup"] + ["clip"] * 4
    trainer.factor = 1.0
    trainer.run(1, batches())
    assert trainer.called[6:] == ["setup"]
    assert "clip" not in vars(trainer)


def test_an_answer_stands_for_its_class_and_its_bases_only():
    counting, shifting = make(Task.add_on(CountingAddon)), make(Task.add_on(ShiftingAddon))
    counting.run(1, batches())
    assert (counting.called, counting.count) == (["setup"], 5)  # Once as the epoch is opened.
    shifting.run(1, batches())
    assert shifting.called == ["setup"] + ["clip"] * 4


def test_of_two_add_ons_of_one_base_the_busy_one_is_called():
    class HalvingAddon(ScalingAddon):
        """Say nothing of itself."""

    class QuietAddon(ScalingAddon):
        """Idle, always."""

        def is_idle(self):
            return True

    trainer = make(Task.add_on(HalvingAddon, QuietAddon))
    trainer.factor = 0.5
    trainer.run(1, batches())
    assert trainer.called.count("clip") == 4


class CountedTask(Task):
    """Notes in which steps the direct way was gone, and by whom a seam is called."""

    def train_step(self, batch):
        self.seen = {"direct": self._own.micro_batch}
        for name in ("clip", "gradients", "zero_grad", "weigh", "backward"):
            self.seen[name] = getattr(self, name).__func__ is getattr(Trainer, name)
        return super().train_step(batch)


def test_a_step_of_idle_add_ons_is_the_plain_one():
    trainer = make(CountedTask.add_on(AMPAddon, GradientAccumulationAddon, MultiGPUAddon), precision="fp32")
    trainer.run(1, batches())
    assert set(trainer.seen.values()) == {True}


@pytest.mark.parametrize(
    ("add_ons", "options", "direct"),
    [
        ((), {}, True),
        ((EMAAddon,), {}, True),
        ((AMPAddon,), {"precision": "fp32"}, True),
        ((AMPAddon,), {"precision": "bf16"}, False),
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 1}, True),
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}, True),
    ],
)
def test_the_direct_way_is_taken_where_nobody_encloses_a_micro_batch(add_ons, options, direct):
    trainer = make(CountedTask.add_on(*add_ons), **options)
    trainer.run(1, batches())
    assert trainer.seen["direct"] is direct


class WindowedTask(Task):
    """Overrides what encloses a micro-batch, to no effect: the step takes the general way."""

    def sync_context(self, last):
        return super().sync_context(last)


@pytest.mark.parametrize("name", ["micro_step", "sync_context", "weigh"])
def test_an_override_of_what_a_micro_batch_is_made_of_is_called(name):
    seen = []

    def override(self, *args):
        seen.append(name)
        return getattr(super(cls, self), name)(*args)

    cls = type("OverridingTask", (Task,), {name: override})
    overriding, plain = make(cls), make(Task)
    for trainer in (overriding, plain):
        trainer.run(1, batches())
    assert seen == [name] * 4
    assert torch.equal(overriding.model.weight, plain.model.weight)


class CountingTargets:
    def train_step(self, batch):
        return {**super().train_step(batch), "num_targets": torch.tensor(3), "norm": batch.norm()}


class Poisoned:
    """The third batch has no finite loss."""

    def train_step(self, batch):
        out = super().train_step(batch)
        self.calls = getattr(self, "calls", 0) + 1
        return {"loss": out["loss"] / 0.0} if self.calls == 3 else out


def decaying(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("mixins", "options"),
    [
        ((), {}),
        ((), {"gradient_clip": 0.1}),
        ((CountingTargets,), {"gradient_clip": 0.1}),
        ((), {"scheduler": decaying, "scheduler_step_on_batch": True}),
        ((), {"scheduler": decaying}),
        ((Poisoned,), {"on_nonfinite": "skip"}),
        ((Poisoned,), {"on_nonfinite": "warn"}),
        ((), {"gradient_accumulation_steps": 3}),
        ((CountingTargets,), {"gradient_accumulation_steps": 3, "gradient_clip": 0.1}),
    ],
)
def test_both_ways_give_the_same_to_the_last_bit(mixins, options):
    ways, shown, ends = [], [], []
    for base in (Task, WindowedTask):
        cls = type("Task", (*mixins, base), {})
        accumulates = "gradient_accumulation_steps" in options
        trainer = make(cls.add_on(GradientAccumulationAddon) if accumulates else cls, **options)
        trainer.on_epoch_end = lambda trainer=trainer: ways.append((trainer._own.micro_batch, trainer._own.step))
        shown.append(repr(trainer.run(3, batches(), batches(2))))  # In text, for NaN is not equal to itself.
        ends.append({**trainer.state_dict()["optimizer"], **trainer.model.state_dict()})
        ends[-1]["log"] = repr(trainer.log_history)
    assert ways == [(True, not accumulates)] * 3 + [(False, False)] * 3
    assert shown[0] == shown[1]
    torch.testing.assert_close(ends[0].pop("weight"), ends[1].pop("weight"), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ends[0].pop("bias"), ends[1].pop("bias"), rtol=0, atol=0, equal_nan=True)
    assert ends[0] == ends[1]


def test_an_add_on_is_asked_again_in_each_epoch_and_around_each_evaluation():
    class EveryOtherAddon(ScalingAddon):
        """Halves the gradients of every other epoch, and has nothing to do with evaluation."""

        asked = ()

        def is_idle(self):
            self.asked += ((self.mode, self.progress_checker.epoch),)
            return self.mode == "test" or self.progress_checker.epoch % 2 == 0

    trainer = make(Task.add_on(EveryOtherAddon), factor=0.5)
    trainer.run(3, batches(), batches(2))
    assert trainer.called == ["setup"] + ["clip"] * 4
    modes = [*dict.fromkeys(trainer.asked)]
    assert modes == [("train", 0), ("test", 1), ("train", 1), ("test", 2), ("train", 2), ("test", 3), ("train", 3)]
    assert not {"clip", "_ways", "_idle"} & set(vars(trainer))


@pytest.mark.parametrize("out", [None, {}, {"los": 1.0}, {"loss": "low"}, {"loss": torch.ones(2)}, {"loss": 1.0}])
def test_both_ways_refuse_the_same_in_the_same_words(out):
    said = []
    for base in (Task, WindowedTask):
        trainer = make(type("BadTask", (base,), {"train_step": lambda self, batch: out}))
        with pytest.raises(StepError) as caught:
            trainer.run(1, batches())
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "BadTask.train_step" in said[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_of_a_trainer_that_runs_is_one_that_is_not_set_up(copied):
    """It goes on by itself, to the same end, and has none of what the run has bound or opened."""
    cls = Task.add_on(AMPAddon, GradientAccumulationAddon, MultiGPUAddon)
    trainer, copies = make(cls, precision="fp32", gradient_accumulation_steps=2), []
    trainer.run_epoch(batches())
    trainer._bar._bar = tempfile.TemporaryFile()  # noqa: SIM115  (as a bar holds its terminal, which nobody can copy)
    copies.append(copied(trainer))
    assert "sync_context" in vars(trainer)
    assert "sync_context" not in vars(copies[0])
    assert not copies[0]._ready
    ends = [each.run(1, batches()) for each in (trainer, *copies)]
    assert ends[0] == ends[1]
    assert torch.equal(trainer.model.weight, copies[0].model.weight)
