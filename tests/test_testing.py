"""`check_addon` passes what keeps the contract, and names what does not, with the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zae.addons
from zae import AddOnBase, AddOnError, Every, Trainer, replaces
from zae.testing import AddOnFault, check_addon
from zae.testing_checks import CHECKS


class GoodAddon(AddOnBase):
    """Count the steps, and say so at the end of an epoch."""

    layer = "observe"

    def __init__(self, *args: Any, start: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = start

    def optimizer_step(self) -> bool:
        stepped = super().optimizer_step()
        self.count += stepped
        return stepped

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "GoodAddon": self.count}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        own, rest = self.take(state, "GoodAddon", strict)
        super().load_state_dict(rest, strict)
        self.count = own


class ForgetsSuperAddon(AddOnBase):
    """Mention super() and not call it."""

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        if not step_dict:
            super().logging(step_dict, weight)


class DropsClippingAddon(AddOnBase):
    """Put other gradients in place after the clipping."""

    layer = "loop"

    def clip(self) -> None:
        super().clip()
        for parameter in self.parameters:
            parameter.grad.mul_(3)


class FalselyIdleAddon(AddOnBase):
    """Halve every gradient, and deny it."""

    layer = "loop"

    def is_idle(self) -> bool:
        return True

    def clip(self) -> None:
        for parameter in self.parameters:
            parameter.grad.div_(2)
        super().clip()


class TwiceWrongAddon(DropsClippingAddon):
    """Draw a number as well."""

    def zero_grad(self) -> None:
        super().zero_grad()
        torch.rand(1)


class SchedulesTwiceAddon(AddOnBase):
    """Step the scheduler by hand too."""

    layer = "loop"

    def optimizer_step(self) -> bool:
        stepped = super().optimizer_step()
        for scheduler in self._schedulers.values():
            scheduler.step()
        return stepped


class CallsTwiceAddon(AddOnBase):
    """Step the scheduler through its seam, twice."""

    layer = "loop"

    def scheduler_step(self, when: str) -> None:
        super().scheduler_step(when)
        super().scheduler_step(when)


class UndeclaredStateAddon(AddOnBase):
    """Weigh the loss by a count that no checkpoint holds."""

    layer = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = 0

    def backward(self, loss: Any) -> None:
        self.seen += 1
        super().backward(loss / self.seen)


class DrawsAddon(AddOnBase):
    """Draw from the global random stream, to log one step in two."""

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        torch.rand(1)


class LogsEverywhereAddon(AddOnBase):
    """Write a file on every rank."""

    def log(self, metrics: Any, step: int) -> None:
        super().log(metrics, step)
        with open("log.txt", "a", encoding="utf-8") as file:
            file.write(f"{step}\n")


class UnpicklableAddon(AddOnBase):
    """Keep a lambda."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shorten = lambda text: text[:10]


class KeepsGraphAddon(AddOnBase):
    """Keep losses as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[str, list[Any]] = {"all": []}

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        self.losses["all"] = [*self.losses["all"], step_dict["loss"]][-3:]


class SynchronisesAddon(AddOnBase):
    """Read the loss at every step."""

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        if step_dict["loss"] > 1e9:
            self.stop("the loss is too large")


class MutatesBatchAddon(AddOnBase):
    """Normalize the loader's own tensors."""

    layer = "model"

    def to_device(self, batch: Any) -> Any:
        batch[0].div_(2)
        return super().to_device(batch)


class ReplacesRunBatchAddon(AddOnBase):
    """Put another loop in, where the class is built."""

    layer = "loop"

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        def run_batch(self: Any, batch: Any) -> None:
            base_cls.run_batch(self, batch)

        return type(base_cls.__name__, (base_cls,), {"run_batch": run_batch, "__module__": __name__})


class ChangesModeAddon(AddOnBase):
    """Look at the model in evaluation mode, and leave it so."""

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        self.model.eval()


class LeavesContextAddon(AddOnBase):
    """Enter in one method, and leave in another."""

    layer = "precision"

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.anomaly = torch.autograd.set_detect_anomaly(True)

    def on_epoch_end(self) -> None:
        torch.autograd.set_detect_anomaly(False)
        super().on_epoch_end()


class ActsEarlyAddon(AddOnBase):
    """Make a folder before anything runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import os

        os.mkdir("runs")


class TamperingAddon(AddOnBase):
    """Say that it observes, and change the weights."""

    layer = "observe"

    def optimizer_step(self) -> bool:
        stepped = super().optimizer_step()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(0.999)
        return stepped


class LeavesThingsAddon(AddOnBase):
    """Hook the model, and never unhook it; keep a file open."""

    def setup(self) -> None:
        super().setup()
        self.handle = self.model.register_forward_hook(lambda *_: None)


FAULTS = [
    (ForgetsSuperAddon, "super", r"forgets super\(\)\.logging\(\)", "call it on every path"),
    (DropsClippingAddon, "clip", "drops clipping: with gradient_clip=0.01, a gradient of norm 0.03", "not after"),
    (SchedulesTwiceAddon, "scheduler", "steps the scheduler 24 times in 12 optimizer steps", "leave it to sched"),
    (CallsTwiceAddon, "super", r"calls super\(\)\.scheduler_step\(\) more than once", "call it once"),
    (UndeclaredStateAddon, "state", "keeps undeclared state: self.seen is 12 .* and 10 ", "under the key 'Undecl"),
    (DrawsAddon, "random", "logging draws from the global random stream 'torch'", "a torch.Generator of your own"),
    (LogsEverywhereAddon, "ranks", "logs on every rank: on rank 1 it opens 'log.txt'", "ask self.is_main first"),
    (UnpicklableAddon, "pickle", "cannot be pickled before a run", "keep no lambda"),
    (KeepsGraphAddon, "graph", r"keeps a tensor with its graph: self.losses\['all'\]\[0\]", "keep tensor.detach"),
    (SynchronisesAddon, "transfer", "synchronises at each step: .*test_testing.py:.*in logging", "read them in log"),
    (MutatesBatchAddon, "batch", r"mutates the batch: batches\[0\]\[0\]", "change a copy, in to_device"),
    (ReplacesRunBatchAddon, "class", "replaces run_batch, which is the loop itself", "override a seam"),
    (ChangesModeAddon, "mode", "changes model.training: it is False inside train_step", "put it back"),
    (LeavesContextAddon, "exception", "leaves a context open after an exception in train_step: the anomaly", "yield"),
    (ActsEarlyAddon, "init", "acts in __init__: it makes the folder 'runs'", r"act in setup\(\)"),
    (TamperingAddon, "neutral", "is in layer 'observe' and changes training", "move to the layer 'loop'"),
    (FalselyIdleAddon, "idle", "says that it is idle and is not: .* the model ends as another", "return False"),
    (LeavesThingsAddon, "exception", "leaves hooks behind after an exception", r"remove them in teardown\(\)"),
]


@pytest.mark.parametrize(("add_on", "check", "told", "cure"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_check_addon_names_a_seeded_fault(add_on: Any, check: str, told: str, cure: str) -> None:
    """The message says what is wrong, in which check, and what to do."""
    with pytest.raises(AddOnFault, match=rf"{told}.*{cure}.*\[{check}\]") as caught:
        check_addon(add_on)
    assert add_on.__name__ in str(caught.value)


def test_check_addon_finds_nothing_else_in_the_faulty_ones() -> None:
    """With the check of its fault left out, most of them pass: a check answers for its own fault alone."""
    alone = [DropsClippingAddon, LogsEverywhereAddon, KeepsGraphAddon, SynchronisesAddon]
    for add_on in alone:
        check = next(check for faulty, check, *_ in FAULTS if faulty is add_on)
        check_addon(add_on, allow=[check], transient=["losses"])


def test_check_addon_refuses_what_the_class_itself_refuses() -> None:
    """A plain override without super(), or of run_batch, does not even become a class."""
    with pytest.raises(AddOnError, match="without calling super"):
        type("Plain", (AddOnBase,), {"clip": lambda self: None, "__doc__": "Drop clipping."})
    with pytest.raises(AddOnError, match="run_batch"):
        type("Loop", (AddOnBase,), {"run_batch": lambda self, batch: None, "__doc__": "Another loop."})


def test_check_addon_passes_a_good_one() -> None:
    check_addon(GoodAddon)
    check_addon(GoodAddon, start=3, beside=[zae.addons.AMPAddon, zae.addons.EMAAddon])


class DoublesAddon(AddOnBase):
    """Clip in another way, and say so."""

    layer = "loop"

    @replaces
    def clip(self) -> None:
        for parameter in self.parameters:
            parameter.grad.sign_()


def test_check_addon_takes_a_declared_replacement() -> None:
    """@replaces passes the check of super(); that clipping is gone has to be allowed by name."""
    check_addon(DoublesAddon, allow=["clip"])
    with pytest.raises(AddOnFault, match="drops clipping"):
        check_addon(DoublesAddon)


def test_check_addon_tells_all_faults_at_once_and_refuses_unknown_checks() -> None:
    with pytest.raises(AddOnFault, match=r"2 faults:[\s\S]*1\. [\s\S]*2\. "):
        check_addon(TwiceWrongAddon)
    with pytest.raises(AddOnError, match="the checks are class, init"):
        check_addon(GoodAddon, allow=["clipping"])
    with pytest.raises(AddOnFault, match="is not an add-on"):
        check_addon(Trainer)


OWN = {
    "AMPAddon": {"precision": "fp16", "loss_scale": (2.0**20, 1.0)},
    "EMAAddon": {"decay": 0.5},
    "EarlyStoppingAddon": {"patience": 100},
    "GradientAccumulationAddon": {"gradient_accumulation_steps": 2},
    "JSONLLoggerAddon": {"jsonl_path": "log.jsonl"},
    "LedgerAddon": {"ledger_path": "ledger.jsonl", "ledger_every": Every(steps=100)},
    "StateManagerAddon": {"save_path": "save", "transient": ["_saved_at", "_token"]},
    "TensorBoardLoggerAddon": {"log_dir": "board"},
}


@pytest.mark.parametrize(
    ("name", "options"), [("AMPAddon", {"precision": "fp32"}), ("GradientAccumulationAddon", {})], ids=str
)
def test_check_addon_passes_our_own_when_they_are_idle(name: str, options: Any) -> None:
    check_addon(getattr(zae.addons, name), **options)


@pytest.mark.parametrize("name", [name for name in OWN if name in zae.addons.__all__])
def test_check_addon_passes_our_own(name: str) -> None:
    check_addon(getattr(zae.addons, name), **OWN[name])


def test_every_check_is_shown_by_a_fault_of_check_addon() -> None:
    assert {check for _, check, *_ in FAULTS} == set(CHECKS)
