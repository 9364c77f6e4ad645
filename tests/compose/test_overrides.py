"""Overrides without effect change no bit, and what others put around an optimizer's step or a loader is called."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from zae import AddOnBase, StepError, Trainer
from zae.addons import AMPAddon, GradientAccumulationAddon, MultiGPUAddon
from zae.display.terminal import Terminal
from zae.schedulers import WarmUpScheduler


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


class WindowedTask(Task):
    """Overrides what encloses a micro-batch, to no effect."""

    def sync_context(self, last):
        return super().sync_context(last)


@pytest.mark.parametrize("name", ["micro_step", "sync_context", "scale_loss"])
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
def test_an_override_without_effect_changes_no_bit(mixins, options):
    shown, ends = [], []
    for base in (Task, WindowedTask):
        cls = type("Task", (*mixins, base), {})
        accumulates = "gradient_accumulation_steps" in options
        trainer = make(cls.add_on(GradientAccumulationAddon) if accumulates else cls, **options)
        shown.append(repr(trainer.run(3, batches(), batches(2))))  # In text, for NaN is not equal to itself.
        ends.append({**trainer.state_dict()["optimizer"], **trainer.model.state_dict()})
        ends[-1]["log"] = repr(trainer.log_history)
    assert shown[0] == shown[1]
    torch.testing.assert_close(ends[0].pop("weight"), ends[1].pop("weight"), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ends[0].pop("bias"), ends[1].pop("bias"), rtol=0, atol=0, equal_nan=True)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("out", [None, {}, {"los": 1.0}, {"loss": "low"}, {"loss": torch.ones(2)}, {"loss": 1.0}])
def test_an_output_is_refused_in_the_same_words_whatever_is_overridden(out):
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
    """It continues by itself, to the same end, and has none of what the run has opened."""
    cls = Task.add_on(AMPAddon, GradientAccumulationAddon, MultiGPUAddon)
    trainer, copies = make(cls, precision="fp32", gradient_accumulation_steps=2), []
    trainer.run_epoch(batches())
    trainer.current_run.display = Terminal()
    trainer.current_run.display._bar = tempfile.TemporaryFile()  # noqa: SIM115  (as a bar holds its terminal, which nobody can copy)
    copies.append(copied(trainer))
    assert not copies[0].current_run.setup.is_done
    ends = [each.run(1, batches()) for each in (trainer, *copies)]
    assert ends[0] == ends[1]
    assert torch.equal(trainer.model.weight, copies[0].model.weight)


# ------------------------------------------------------------------------------------- the step of an optimizer


class Clipping(AddOnBase):
    """Overrides a hook of the step, to no effect."""

    layer = "loop"

    def clip(self):
        super().clip()


def warmed(optimizer):
    return WarmUpScheduler(optimizer, total_iters=4, eta_min=0.01)


def test_a_profiler_sees_the_steps_of_an_optimizer_and_the_batches():
    """also where it begins in the midst of a run."""

    class Profiled(Task):
        def on_epoch_begin(self):
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profiler.start()

        def on_epoch_end(self):
            super().on_epoch_end()
            if self.progress_checker.epoch == 2:
                self.profiler.stop()

    trainer = make(Profiled)
    trainer.run(3, DataLoader(Samples(), batch_size=2))
    counts = {each.key: each.count for each in trainer.profiler.key_averages()}
    assert counts["Optimizer.step#SGD.step"] == 4
    assert counts["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"] >= 4


class Samples(Dataset):
    """Eight samples that the exact data path does not gather."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), float(index))


def test_what_somebody_has_put_around_a_loaders_batches_is_called(monkeypatch):
    kind, called = type(iter(DataLoader(Samples()))), []
    plain = kind.__next__
    monkeypatch.setattr(kind, "__next__", lambda self: (called.append(self), plain(self))[1])
    make(Task).run(1, DataLoader(Samples(), batch_size=2))
    assert len(called) >= 4


@pytest.mark.parametrize("add_ons", [(), (Clipping,)], ids=["plain", "overridden"])
def test_hooks_of_a_step_are_called_from_the_next_step_on(add_ons):
    """those of one optimizer and those of all; one that comes in the midst of an epoch too."""
    called = []

    class Hooking(Task):
        def train_step(self, batch):
            step = self.progress_checker.step
            if step == 1:
                self.optimizer.register_step_pre_hook(lambda *_: called.append(("pre", step_now())))
                self.optimizer.register_step_post_hook(lambda *_: called.append(("post", step_now())))
            if step == 3:
                handles.append(register_optimizer_step_pre_hook(lambda *_: called.append(("all pre", step_now()))))
                handles.append(register_optimizer_step_post_hook(lambda *_: called.append(("all post", step_now()))))
            return super().train_step(batch)

    def step_now():
        return trainer.progress_checker.step

    handles = []
    trainer = make(Hooking.add_on(*add_ons))
    try:
        trainer.run(1, batches(5))
    finally:
        for handle in handles:
            handle.remove()
    own = [[("pre", step), ("post", step)] for step in (1, 2)]
    both = [[("all pre", step), ("pre", step), ("post", step), ("all post", step)] for step in (3, 4)]
    assert called == [each for group in own + both for each in group]


def test_a_step_of_ones_own_is_called():
    """put on the optimizer, on its class, around that of its class, or in the place of a scheduler's."""
    called = []

    def noting(function):
        @functools.wraps(function)
        def step(*args, **kwargs):
            called.append(1)
            return function(*args, **kwargs)

        return step

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            called.append(1)
            return super().step(closure)

    class OwnWrapper(torch.optim.SGD):
        profile_hook_step = staticmethod(noting)

        def step(self, closure=None):
            return super().step(closure)

    class Later(torch.optim.SGD):
        """Its step is wrapped when torch has done so."""

    def build(change, kind=torch.optim.SGD):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        change(optimizer)
        return Task(model, "cpu", optimizer=optimizer, log_bar=False)

    def on_it(optimizer):
        optimizer.step = noting(optimizer.step)

    def on_its_class(optimizer):
        Later.step = noting(Later.step)

    def silenced(optimizer):
        """As one keeps a scheduler from saying that the step was overridden."""
        optimizer.step = noting(type(optimizer).step).__get__(optimizer)
        optimizer.step.__func__._wrapped_by_lr_sched = True

    def over_a_scheduler(optimizer):
        optimizer.keeps = warmed(optimizer)
        optimizer.step = noting(optimizer.step)

    expected = weights_of(build(lambda optimizer: None))
    for change, kind in [
        (on_it, torch.optim.SGD), (lambda optimizer: None, Own), (lambda optimizer: None, OwnWrapper),
        (on_its_class, Later), (silenced, torch.optim.SGD),
    ]:  # fmt: skip
        called.clear()
        assert torch.equal(weights_of(build(change, kind)), expected)
        assert len(called) == 4
    called.clear()
    build(over_a_scheduler).run(1, batches())
    assert len(called) == 4


def weights_of(trainer):
    trainer.run(1, batches())
    return trainer.model.weight.detach()
