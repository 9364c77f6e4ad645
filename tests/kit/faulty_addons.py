"""Add-ons with one fault each in what they do, and what `check_addon` has to say of it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from zae import AddOnBase, replaces


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


class TwiceWrongAddon(DropsClippingAddon):
    """Draw a number as well."""

    def zero_grad(self) -> None:
        super().zero_grad()
        torch.rand(1)


class CallsTwiceAddon(AddOnBase):
    """Step the scheduler through its hook, twice."""

    layer = "loop"

    def scheduler_step(self, when: str) -> None:
        super().scheduler_step(when)
        super().scheduler_step(when)


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


class LeavesThingsAddon(AddOnBase):
    """Hook the model, and never unhook it; keep a file open."""

    def setup(self) -> None:
        super().setup()
        self.handle = self.model.register_forward_hook(lambda *_: None)


class SwallowsRuntimeErrorAddon(AddOnBase):
    """Skip a batch on which the step fails."""

    layer = "loop"

    @replaces
    def micro_step(self, batch: Any, count: int) -> Any:
        try:
            return super().micro_step(batch, count)
        except RuntimeError:
            return {"loss": torch.zeros(())}, 1.0


class SwallowsValueErrorAddon(AddOnBase):
    """End an epoch where the loader fails."""

    layer = "loop"

    def batches(self, loader: Any) -> Any:
        try:
            yield from super().batches(loader)
        except ValueError:
            return


class SwallowsInOptimizerAddon(AddOnBase):
    """Skip a step on which the optimizer fails."""

    layer = "loop"

    def optimizer_step(self) -> bool:
        try:
            return super().optimizer_step()
        except OSError:
            return False


class SwallowsCtrlCAddon(AddOnBase):
    """Go on after a Ctrl-C."""

    layer = "loop"

    @replaces
    def gradients(self, batch: Any) -> Any:
        try:
            return super().gradients(batch)
        except KeyboardInterrupt:
            return [({"loss": torch.zeros(())}, 1.0)]


class NeedsSetupAddon(AddOnBase):
    """Tear down what was never set up."""

    def setup(self) -> None:
        super().setup()
        self.buffer = [0]

    def teardown(self) -> None:
        self.buffer.clear()
        super().teardown()


class LeavesThreadAddon(AddOnBase):
    """End a thread only when all goes well."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.done = threading.Event()
        threading.Thread(target=self.done.wait, args=(3,), daemon=True).start()

    def on_run_end(self) -> None:
        self.done.set()
        super().on_run_end()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "done"}


class LeavesGradientHooksAddon(AddOnBase):
    """Hook every weight, and never unhook it."""

    def setup(self) -> None:
        super().setup()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(_look)


def _look(parameter: Any) -> None:
    """Look at a gradient."""


FAULTS: list[tuple[Any, str, str, str]] = [
    (ForgetsSuperAddon, "super", r"forgets super\(\)\.logging\(\)", "call it on every path"),
    (DropsClippingAddon, "clip", "drops clipping: with gradient_clip=0.01, a gradient of norm 0.03", "not after"),
    (CallsTwiceAddon, "super", r"calls super\(\)\.scheduler_step\(\) more than once", "zae.repeats"),
    (DrawsAddon, "random", "draws from the global random stream 'torch'", "draw from self.generator"),
    (LogsEverywhereAddon, "ranks", "writes on every rank: on rank 1 it writes 'log.txt'", "ask self.is_main first"),
    (UnpicklableAddon, "pickle", "cannot be pickled before a run", "keep no lambda"),
    (ReplacesRunBatchAddon, "class", "replaces run_batch, which is the loop itself", "override a hook"),
    (ChangesModeAddon, "mode", "changes model.training: it is False inside train_step", "put it back"),
    (LeavesContextAddon, "exception", "leaves a context open after an exception in train_step: the anomaly", "yield"),
    (LeavesThingsAddon, "exception", "leaves hooks behind after an exception", r"remove them in teardown\(\)"),
    (SwallowsRuntimeErrorAddon, "exception", "swallows an exception of train_step", "let it pass"),
    (SwallowsValueErrorAddon, "exception", "swallows an exception of loader", "raise it again"),
    (SwallowsInOptimizerAddon, "exception", "swallows an exception of step_one", "let it"),
    (SwallowsCtrlCAddon, "exception", "swallows a KeyboardInterrupt of train_step", "let it pass"),
    (NeedsSetupAddon, "exception", "replaces an exception of setup with AttributeError .*'buffer'", "set in"),
    (LeavesThreadAddon, "exception", "leaves a thread running after an exception in train_step", "end it in teardown"),
    (LeavesGradientHooksAddon, "exception", "leaves hooks behind after an exception", r"remove them in teardown\(\)"),
]
"""Each with the check that finds it, and what the message says of the fault and of its remedy."""
