"""Add-ons with one fault each, and what `check_addon` has to say of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
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
        for scheduler in self.schedulers.values():
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


class ForgetfulAddon(AddOnBase):
    """Drop the metrics of the user's class."""

    layer = "control"

    def metric_on_epoch_end(self) -> Any:
        super().metric_on_epoch_end()
        return {"mine": 1.0}


class DropsFromStepAddon(AddOnBase):
    """Return the loss, and nothing else of what the step returned."""

    layer = "model"

    def train_step(self, batch: Any) -> Any:
        return {"loss": super().train_step(batch)["loss"]}


class DropsFromLogAddon(AddOnBase):
    """Log the metrics of training alone."""

    def log(self, metrics: Any, step: int) -> None:
        super().log({name: value for name, value in metrics.items() if name.startswith("train")}, step)


class DoubleAddon(AddOnBase):
    """Leave another default dtype behind."""

    layer = "loop"

    def setup(self) -> None:
        super().setup()
        torch.set_default_dtype(torch.float64)


class OneThreadAddon(AddOnBase):
    """Leave another number of threads behind."""

    def setup(self) -> None:
        super().setup()
        torch.set_num_threads(torch.get_num_threads() + 1)


class DeterministicAddon(AddOnBase):
    """Leave deterministic algorithms behind."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        torch.use_deterministic_algorithms(True)


class SetsVariableAddon(AddOnBase):
    """Leave a variable in the environment."""

    def setup(self) -> None:
        super().setup()
        os.environ["OMP_WAIT_POLICY"] = "passive"


class ChangesFolderAddon(AddOnBase):
    """Work in another folder."""

    def setup(self) -> None:
        super().setup()
        os.makedirs("runs", exist_ok=True)
        os.chdir("runs")


class SilencesWarningsAddon(AddOnBase):
    """Silence every warning of the process."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        warnings.simplefilter("ignore")


class TakesSignalAddon(AddOnBase):
    """Keep a signal for itself."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


class PatchesAddon(AddOnBase):
    """Replace a function of torch."""

    def setup(self) -> None:
        super().setup()
        original = torch.nn.functional.relu
        torch.nn.functional.relu = lambda x, inplace=False: original(x, inplace)


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


class PopsAddon(GoodAddon):
    """Take its entry out of the caller's state."""

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.count = state.pop("GoodAddon")
        super(GoodAddon, self).load_state_dict(state, strict)


class AliasesAddon(AddOnBase):
    """Count in the very tensor that was loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = torch.zeros(1)

    def optimizer_step(self) -> bool:
        self.count += 1
        return super().optimizer_step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "AliasesAddon": self.count}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.count, rest = self.take(state, "AliasesAddon", strict)
        super().load_state_dict(rest, strict)


class WrongKeyAddon(AddOnBase):
    """Save under a name that is not its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict(self.take(state, "count", strict)[1], strict)


class UnsavableAddon(GoodAddon):
    """Save what only pickle can."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "UnsavableAddon": Path("runs")}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict(self.take(state, "UnsavableAddon", strict)[1], strict)


class IgnoresStateAddon(GoodAddon):
    """Save its count, and not load it."""

    layer = "loop"

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super(GoodAddon, self).load_state_dict(self.take(state, "GoodAddon", strict)[1], strict)


class HiddenStateAddon(AddOnBase):
    """Draw from a separate stream that no checkpoint contains."""

    layer = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream = torch.Generator().manual_seed(0)

    def backward(self, loss: Any) -> None:
        super().backward(loss * torch.rand((), generator=self.stream))


class ResetsAddon(AddOnBase):
    """Begin to count again with each call of run, and step by the count."""

    layer = "loop"

    def setup(self) -> None:
        super().setup()
        self.seen = 0

    def backward(self, loss: Any) -> None:
        self.seen += 1
        super().backward(loss / self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ResetsAddon": self.seen}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.seen, rest = self.take(state, "ResetsAddon", strict)
        super().load_state_dict(rest, strict)


class UnfreezesAddon(AddOnBase):
    """Train everything, whatever the user froze."""

    layer = "loop"

    def setup(self) -> None:
        super().setup()
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)


class UnfreezesInStepAddon(AddOnBase):
    """Freeze the weights while the metrics are computed, and thaw all of them afterwards."""

    layer = "loop"

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        super().logging(step_dict, weight)
        for parameter in self.parameters:
            parameter.requires_grad_(True)


class UnfreezesAtTheEndAddon(AddOnBase):
    """Thaw all weights when it is torn down."""

    layer = "loop"

    def teardown(self) -> None:
        for parameter in self.unwrap().parameters():
            parameter.requires_grad_(True)
        super().teardown()


class ForgetsBestAddon(AddOnBase):
    """Keep a best value that no checkpoint holds."""

    layer = "control"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lowest = float("inf")

    def check_better(self, metrics: Any) -> bool:
        self.lowest = min(self.lowest, metrics["loss"])
        return super().check_better(metrics)


class DeclaresUnsetAddon(AddOnBase):
    """Declare state that it never sets."""

    state_attributes = ("seen",)


class TrainsNormsAddon(AddOnBase):
    """Put the whole model in training mode after each validation."""

    layer = "loop"

    def checkpoint(self) -> None:
        super().checkpoint()
        self.model.train()


class LeavesAverageAddon(AddOnBase):
    """Evaluate with smaller weights, and leave them."""

    layer = "loop"

    @contextlib.contextmanager
    def evaluation_context(self) -> Iterator[None]:
        with super().evaluation_context():
            for weight in self.unwrap().parameters():
                weight.data.mul_(0.99)
            yield


class MainOnlyAddon(AddOnBase):
    """Wait for the other ranks on rank 0 alone."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.is_main:
            self.barrier()


class MainOnlyTorchAddon(AddOnBase):
    """Sum over the ranks on rank 0 alone, through torch."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if torch.distributed.is_initialized() and self.is_main:
            torch.distributed.all_reduce(torch.ones(1))


class HoldsOptimizerAddon(AddOnBase):
    """Keep the optimizer that was given, which setup() may replace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = {"optimizer": self.optimizer}


class HoldsWeightsAddon(AddOnBase):
    """Keep the weights that were given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = list(self.model.parameters())


class ChangesRateAddon(AddOnBase):
    """Change the learning rate before anything runs."""

    layer = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer.param_groups[0]["lr"] = 0.01


class SetsVariableEarlyAddon(AddOnBase):
    """Set a variable of the environment before anything runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


class ReadsEarlyAddon(AddOnBase):
    """Read the optimizer before it is built."""

    layer = "loop"

    def setup(self) -> None:
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        super().setup()


class SharesAddon(AddOnBase):
    """Collect in a list that all trainers share."""

    steps: list[int] = []

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        self.steps.append(self.progress_checker.step)


class ChangesOptionAddon(AddOnBase):
    """Collect in the list of the caller."""

    def __init__(self, *args: Any, names: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names = names

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.names.append("epoch")


class HidesOptionAddon(AddOnBase):
    """Take an option that nobody can see."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.factor = kwargs.pop("factor", 2)
        super().__init__(*args, **kwargs)


class ConsumesAddon(AddOnBase):
    """Count the batches, and use up a generator."""

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        self.count = sum(1 for _ in loader)
        return super().wrap_loader(loader, training)


class KeepsAllAddon(AddOnBase):
    """Keep the loss of each step, detached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[Any] = []

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        self.losses.append(step_dict["loss"].detach())


class SeedsAddon(AddOnBase):
    """Seed the streams of training."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        torch.manual_seed(3)


class ForgetsScheduleAddon(AddOnBase):
    """Never tell the schedulers of a step."""

    layer = "loop"

    def optimizer_step(self) -> bool:
        super().optimizer_step()
        return False


FAULTS: list[tuple[Any, str, str, str]] = [
    (ForgetsSuperAddon, "super", r"forgets super\(\)\.logging\(\)", "call it on every path"),
    (DropsClippingAddon, "clip", "drops clipping: with gradient_clip=0.01, a gradient of norm 0.03", "not after"),
    (SchedulesTwiceAddon, "scheduler", "steps the scheduler 24 times in 12 optimizer steps", "leave it to sched"),
    (CallsTwiceAddon, "super", r"calls super\(\)\.scheduler_step\(\) more than once", "zae.repeats"),
    (UndeclaredStateAddon, "state", "keeps undeclared state: self.seen is 12 .* and 10 ", "under the key 'Undecl"),
    (DrawsAddon, "random", "logging draws from the global random stream 'torch'", "draw from self.generator"),
    (LogsEverywhereAddon, "ranks", "logs on every rank: on rank 1 it opens 'log.txt'", "ask self.is_main first"),
    (UnpicklableAddon, "pickle", "cannot be pickled before a run", "keep no lambda"),
    (KeepsGraphAddon, "graph", r"keeps a tensor with its graph: self.losses\['all'\]\[0\]", "keep tensor.detach"),
    (SynchronisesAddon, "transfer", "synchronises at each step: .*faulty_addons.py:.*in logging", "read them in log"),
    (MutatesBatchAddon, "batch", r"mutates the batch: batches\[0\]\[0\]", "change a copy, in to_device"),
    (ReplacesRunBatchAddon, "class", "replaces run_batch, which is the loop itself", "override a seam"),
    (ChangesModeAddon, "mode", "changes model.training: it is False inside train_step", "put it back"),
    (LeavesContextAddon, "exception", "leaves a context open after an exception in train_step: the anomaly", "yield"),
    (ActsEarlyAddon, "init", "acts in __init__: it makes the folder 'runs'", r"act in setup\(\)"),
    (TamperingAddon, "neutral", "is in layer 'observe' and changes training", "move to the layer 'loop'"),
    (FalselyIdleAddon, "idle", "says that it is idle and is not: .* the model ends as another", "return False"),
    (LeavesThingsAddon, "exception", "leaves hooks behind after an exception", r"remove them in teardown\(\)"),
    (ForgetfulAddon, "metrics", "drops the user's metrics: train_kit_epoch are not in train_history", "return {"),
    (DropsFromStepAddon, "metrics", "drops the user's metrics: train_kit_step", "in train_step, logging and log"),
    (DropsFromLogAddon, "metrics", "drops the user's metrics: valid/loss, .* are not in log_history", "likewise"),
    (DoubleAddon, "settings", r"the default dtype \(torch.float32 became torch.float64\)", "in teardown"),
    (OneThreadAddon, "settings", "the threads of torch", "restore it in"),
    (DeterministicAddon, "settings", "the deterministic algorithms", "restore it in"),
    (
        SetsVariableAddon,
        "settings",
        r"the environment variable 'OMP_WAIT_POLICY' \(was set\)",
        "restore it in teardown",
    ),
    (ChangesFolderAddon, "settings", "the working folder", "restore it in"),
    (SilencesWarningsAddon, "settings", "the filters of warnings", "use a context manager"),
    (TakesSignalAddon, "settings", "the handler of SIGHUP", "restore it in"),
    (PatchesAddon, "settings", "the function torch.nn.functional.relu", "restore it in"),
    (SwallowsRuntimeErrorAddon, "exception", r"swallows an exception of train_step \(RuntimeError, Not", "let it pass"),
    (SwallowsValueErrorAddon, "exception", r"swallows an exception of loader \(ValueError\)", "raise it again"),
    (SwallowsInOptimizerAddon, "exception", r"swallows an exception of step_one \(OSError, TimeoutError\)", "let it"),
    (SwallowsCtrlCAddon, "exception", r"swallows an exception of train_step \(KeyboardInterrupt\)", "let it pass"),
    (NeedsSetupAddon, "exception", r"fails with AttributeError where setup\(\) does not end .*'buffer'", "set in"),
    (LeavesThreadAddon, "exception", "leaves a thread running after an exception in train_step", "end it in teardown"),
    (PopsAddon, "state", "takes 'GoodAddon' out of the state", r"self.take\(state, 'PopsAddon', strict\)"),
    (AliasesAddon, "state", "changes the state that it was loaded from: state\\['AliasesAddon'\\]", "copy what"),
    (WrongKeyAddon, "state", "saves its state under 'count'", "'WrongKeyAddon': ..."),
    (UnsavableAddon, "state", "has a state that no checkpoint can contain: .*Path", "return numbers, text, tensors"),
    (IgnoresStateAddon, "state", "keeps undeclared state: self.count is 12 .* and 10 ", r"load_state_dict\(\)"),
    (HiddenStateAddon, "state", "keeps undeclared state: self.stream", r"add it to state_dict\(\)"),
    (ResetsAddon, "again", r"forgets something between two calls of run: .* model", r"do not reset in setup\(\)"),
    (UnfreezesAddon, "frozen", "unfreezes what the user froze: parameter '1.0.weight' requires", "put those back"),
    (UnfreezesInStepAddon, "frozen", "unfreezes what the user froze: parameter '1.0.weight'", "put those back"),
    (UnfreezesAtTheEndAddon, "frozen", "unfreezes what the user froze: parameter '1.0.weight'", "put those back"),
    (LeavesGradientHooksAddon, "exception", "leaves hooks behind after an exception", r"remove them in teardown\(\)"),
    (ForgetsBestAddon, "state", "keeps undeclared state: self.lowest is .* and ", "add it to state_dict"),
    (
        DeclaresUnsetAddon,
        "state",
        "declares the state attribute 'seen', which it has not set",
        "set self.seen in __init",
    ),
    (TrainsNormsAddon, "frozen", "unfreezes what the user froze: module '1.0' is in training mode", "put those back"),
    (LeavesAverageAddon, "evaluation", "leaves other weights in the model after a validation", "in the finally of"),
    (MainOnlyAddon, "ranks", "calls a collective on some ranks only: rank 0 calls barrier, .*", "every rank"),
    (MainOnlyTorchAddon, "ranks", "fails in two processes: rank 0 raises RuntimeError", "equally often"),
    (HoldsOptimizerAddon, "init", r"holds in __init__ .*: self.held\['optimizer'\] is the optimizer", "read self.opt"),
    (HoldsWeightsAddon, "init", r"self.weights\[0\] is the parameter '0.weight'", r"self.parameters in setup\(\)"),
    (ChangesRateAddon, "init", "acts in __init__: it changes the optimizer", r"act in setup\(\)"),
    (SetsVariableEarlyAddon, "init", "changes the environment variable 'TOKENIZERS_PARALLELISM'", r"act in setup\(\)"),
    (ReadsEarlyAddon, "factory", "fails where optimizer= and .* 'function' object has no attribute", "after super"),
    (SharesAddon, "shared", "keeps state on the class: SharesAddon.steps", "set self.steps in __init__"),
    (ChangesOptionAddon, "shared", "changes the option 'names' that the caller gave", "copy it in __init__"),
    (HidesOptionAddon, "class", r"takes the option 'factor' out of \*\*kwargs", r"\(self, \*args, factor="),
    (ConsumesAddon, "loader", "consumes the loader: it is iterated over", "look at each batch as it passes"),
    (KeepsAllAddon, "graph", "keeps tensors of every step: self.losses holds 6 after 6 .* 12", "keep a running value"),
    (SeedsAddon, "random", "on_epoch_begin draws from the global random stream 'torch'", "draw from self.generator"),
    (ForgetsScheduleAddon, "scheduler", "steps the scheduler 0 times in", "leave it to scheduler_step"),
]
"""Each with the check that finds it, and what the message says of the fault and of its cure."""
