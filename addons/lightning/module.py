"""What is read of a LightningModule: its hooks, its optimizers, and what it logs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.addons.lightning.view import PlanView, warn_once
from zae.common.copying import deep_copy
from zae.common.torch_private import last_metric_value
from zae.common.walk import copy_of
from zae.errors import ConfigError, LoaderError, StepError, TaskError, kind_of
from zae.loop.epoch_log import EpochLog
from zae.loop.history import split_prefix
from zae.metrics.torchmetrics_values import metrics_in

__all__ = [
    "Configured",
    "Records",
    "Schedule",
    "base_of",
    "call",
    "check_class",
    "check_module",
    "is_overridden",
    "load_state",
    "loader_of",
    "parse_optimizers",
    "read_state",
    "usable_loader",
    "warn_once",
]

_PACKAGES = ("lightning", "pytorch_lightning")
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max, "min": min}
_MANUAL = (
    "optimizes manually (self.automatic_optimization = False); write a zae task: class Task(Trainer) with train_step, "
    "which may return a dict with one loss for each optimizer"
)
_MODES = [f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")]
_REFUSED = {
    "configure_callbacks": "callbacks of Lightning are not run here; use add-ons, EarlyStoppingAddon for instance",
    "configure_sharded_model": "write it as configure_model, or use FSDPAddon",
    **{
        f"{stage}_epoch_end": f"write on_{name}_epoch_end"
        for stage, name in (("training", "train"), ("validation", "validation"), ("test", "test"))
    },
    **dict.fromkeys(_MODES, "zae switches the modes of all modules; set them in train() and eval() of the module"),
    "on_validation_model_zero_grad": "gradients are dropped after each step here; leave it out",
}
_STEP_HOOKS = {
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
}
_EPOCH_HOOKS = {"on_train_start", "on_train_epoch_start", "on_train_epoch_end"} | {
    hook.format(stage)
    for stage in ("validation", "test")
    for hook in (
        "{}_step",
        "on_{}_start",
        "on_{}_epoch_start",
        "on_{}_batch_start",
        "on_{}_batch_end",
        "on_{}_epoch_end",
    )
}


def base_of(cls: type, name: str = "LightningModule") -> type | None:
    """Return the class of Lightning that a class derives from, of either package; None where there is none."""
    return next((c for c in cls.__mro__ if c.__name__ == name and c.__module__.partition(".")[0] in _PACKAGES), None)


def is_overridden(owner: Any, name: str) -> bool:
    """Return whether a module, a data module or a class of them has its own hook."""
    cls = owner if isinstance(owner, type) else type(owner)
    base = base_of(cls) or base_of(cls, "LightningDataModule")
    return getattr(cls, name, None) is not getattr(base, name, None)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a hook with as many of the arguments as it takes."""
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    count = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return function(*(args if inspect.Parameter.VAR_POSITIONAL in kinds else args[:count]))


def check_class(cls: Any) -> None:
    """Refuse a class that is not a LightningModule, or that has what cannot run here."""
    if not isinstance(cls, type) or base_of(cls) is None:
        raise TaskError(
            f"task_of() takes a LightningModule, its class or an instance, and got {kind_of(cls)}; of another module "
            "write a task: class Task(Trainer) with train_step and test_step"
        )
    for name, remedy in _REFUSED.items():
        if is_overridden(cls, name):
            raise TaskError(f"{cls.__name__}.{name} cannot be carried over: {remedy}")
    if getattr(cls, "automatic_optimization", True) is False:
        raise TaskError(f"{cls.__name__} {_MANUAL}")


def check_module(module: Any) -> None:
    """Refuse a module, or a class of modules, that cannot run here."""
    is_instance = base_of(type(module)) is not None
    check_class(type(module) if is_instance else module)
    if is_instance and not module.automatic_optimization:
        raise TaskError(f"{type(module).__name__} {_MANUAL}")


# --------------------------------------------------------------------------------------------------------- optimizers


class Schedule:
    """A scheduler of ``configure_optimizers``, stepped as its ``LRSchedulerConfig`` of Lightning says."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.scheduler = config.scheduler

    @property
    def optimizer(self) -> Any:
        """The optimizer whose learning rates it changes."""
        return self.scheduler.optimizer

    @property
    def last_epoch(self) -> int:
        """How often it was stepped."""
        return int(getattr(self.scheduler, "last_epoch", 0))

    @property
    def steps_on_batch(self) -> bool:
        """Whether it is stepped after optimizer steps."""
        return bool(self.config.interval == "step")

    def step(self) -> None:
        """Step it where that needs no metric, as a plan of the learning rates does."""
        if not self.config.reduce_on_plateau:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the scheduler."""
        self.scheduler.load_state_dict(dict(state))


def parse_optimizers(module: Any, given: Any) -> tuple[Optimizer, list[Schedule]]:
    """Return what ``configure_optimizers`` returned as an optimizer and schedules; Lightning reads and checks it."""
    base: Any = base_of(type(module))
    theirs = import_module(base.__module__.removesuffix(".module") + ".optimizer")
    if given is None:
        raise ConfigError("configure_optimizers returned None; return an optimizer")
    optimizers, schedulers, monitor = theirs._configure_optimizers(given)
    if len(optimizers) != 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers, which need manual optimization; write a zae "
            "task with optimizer={'a': ..., 'b': ...} and a train_step that returns a loss for each"
        )
    configs = theirs._configure_schedulers_automatic_opt(schedulers, monitor)
    theirs._validate_optimizers_attached(optimizers, configs)
    return optimizers[0], [Schedule(each) for each in configs]


class Configured:
    """Stands for the optimizer until ``configure_optimizers`` is called, when the run knows its length."""

    def __init__(self, module: Any, trainer: Any) -> None:
        self.module = module
        self.trainer = trainer

    def __call__(self, parameters: Any) -> Optimizer:
        """Return the optimizer of a copy of the module, for a plan of the run."""
        module = deep_copy(self.module)
        module.trainer = PlanView(self.trainer)
        return parse_optimizers(module, module.configure_optimizers())[0]


# ------------------------------------------------------------------------------------------------------- what is logged


class Records:
    """What ``self.log`` is given: the values of the step in progress, and those of the open epoch and evaluation.

    Attributes
    ----------
    callback_metrics : dict of str to Tensor
        The last value under each name of Lightning: ``loss``, ``loss_step`` and ``loss_epoch``.
    hook : str
        The hook that is running.
    weight : float
        What the batch weighs in the means of an epoch.
    suffix : str
        What Lightning appends to the names of one of several loaders.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.callback_metrics: dict[str, Tensor] = {}
        self.train = EpochLog("log_train", keeps=False)
        self.test = EpochLog("log_test", keeps=False)
        self.hook = ""
        self.suffix = ""
        self.weight = 1.0
        self._mark: tuple[int, int, list[Any], dict[str, Any]] = (0, 0, [], {})
        self._step: list[tuple[str, Any, float]] = []
        self._epoch: list[tuple[str, Any, float]] = []
        self._reductions: dict[str, list[str]] = {}
        """For each name of an epoch, how its values are combined, and the name without "_epoch"."""
        self._metrics: dict[str, Any] = {}
        self._synced: dict[str, list[Any]] = {}
        """For each name of a step with ``sync_dist``, the batch, the value and how those of the ranks are combined."""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a value, as ``LightningModule.log``; the values of an epoch are those of all ranks in any case.

        With ``sync_dist``, ``callback_metrics`` has at the end of an epoch that of its last step over all ranks.
        """
        if self.hook not in _STEP_HOOKS | _EPOCH_HOOKS:
            where = f"in {self.hook}" if self.hook else "outside of the hooks of a run"
            raise StepError(f"self.log({name!r}, ...) was called {where}, where nothing is recorded; call it in a step")
        in_step = self.hook in _STEP_HOOKS
        by_step = in_step if on_step is None else on_step
        by_epoch = not in_step if on_epoch is None else on_epoch
        suffix = self.suffix if add_dataloader_idx else ""
        step_name, epoch_name = (f"{name}_step", f"{name}_epoch") if by_step and by_epoch else (name, name)
        if callable(getattr(value, "compute", None)) and isinstance(value, nn.Module):
            if by_epoch:
                self._metrics[epoch_name + suffix] = value
            value = last_metric_value(value) if by_step else None
            by_epoch = False
        self._reductions[epoch_name + suffix] = [_reduction(name, reduce_fx), name + suffix]
        if value is None:
            return
        value = _scalar(name, value)
        weight = self.weight if batch_size is None or not self.weight else float(batch_size)
        if by_step:
            self._step.append((step_name + suffix, value, weight))
            if sync_dist:
                self._synced[step_name + suffix] = [
                    self._trainer.batch_index,
                    float(value),
                    _reduction(name, reduce_fx),
                ]
            self.callback_metrics |= {step_name + suffix: value, name + suffix: value}
        if by_epoch:
            self._epoch.append((epoch_name + suffix, value, weight))

    def _sync(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Set the values of a step with ``sync_dist`` to those of the ranks that had samples in it."""
        for name in dict.fromkeys(name for each in ranks for name in each):
            found = [each[name] for each in ranks if name in each]
            last = max(index for index, *_ in found)
            reduction = found[0][2]
            values = [value for index, value, _ in found if index == last]
            whole = math.fsum(values) / len(values) if reduction == "mean" else _REDUCTIONS[reduction](values)
            self.callback_metrics[name] = torch.tensor(whole)

    def commit(self, split: str, log: EpochLog | None) -> bool:
        """Add the values of a step to the logs of a split; return whether there were any."""
        waiting = self._step
        self._step = []
        own = self._epoch
        self._epoch = []
        for name, value, weight in own:
            getattr(self, split).record({name: value}, weight)
        if log is not None:
            for name, value, weight in waiting:
                log.record({split_prefix(name)[1]: value}, weight)
        return bool(waiting or own)

    def mark(self, module: Any) -> None:
        """Remember what is waiting, and the metrics of a module, for `rewind`."""
        metrics = [*metrics_in(module)] if module is not None else []
        states = []
        for _, metric in metrics:
            counted = {key: copy_of(value) for key, value in metric.metric_state.items()}
            states.append((metric, counted))
        self._mark = len(self._step), len(self._epoch), states, dict(self._synced)

    def rewind(self) -> None:
        """Forget what was logged since the mark: it is that of a batch that weighs nothing."""
        steps, epochs, states, self._synced = self._mark
        del self._step[steps:], self._epoch[epochs:]
        for metric, state in states:
            for key, value in state.items():
                setattr(metric, key, value)

    def drop(self) -> None:
        """Drop the values of a step that was not completed."""
        self._step = []
        self._epoch = []

    def close(self, split: str) -> dict[str, float]:
        """Return what was logged of an epoch on all ranks, by its names without the split, and clear its log."""
        log: EpochLog = getattr(self, split)
        trainer = self._trainer
        whole = log.over_ranks(trainer.engine.gather_dp, trainer.engine.dp_world_size)
        metrics = self._metrics
        if trainer.world_size > 1:  # A rank without batches has logged nothing.
            modules = dict(metrics_in(trainer.unwrap()))
            names = {id(each): name for name, each in modules.items()}
            own = self._reductions, {n: names[id(m)] for n, m in metrics.items()}, self._synced
            ranks = trainer.gather(own)
            for reductions, found, _ in ranks:
                self._reductions |= reductions
                metrics |= {name: modules[where] for name, where in found.items()}
            self._sync([synced for _, _, synced in ranks])
        values = whole.means()
        for name in values:
            if (reduction := self._reductions[name][0]) != "mean":
                values[name] = _REDUCTIONS[reduction](whole[name])
        for name, metric in sorted(metrics.items()):
            values[name] = float(_scalar(name, metric.compute()))
        for metric in metrics.values():
            metric.reset()
        self._metrics = {}
        self._synced = {}
        log.clear()
        for name, value in values.items():
            self.callback_metrics[name] = self.callback_metrics[self._reductions[name][1]] = torch.tensor(value)
        return {split_prefix(name.removesuffix(self.suffix))[1]: value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the open epoch."""
        last = {name: value.detach().cpu() for name, value in self.callback_metrics.items()}
        return {"train": self.train.state_dict(), "last": last, "reductions": dict(self._reductions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.train.load_state_dict(state["train"])
        reductions = dict(state["reductions"])
        self.callback_metrics = dict(state["last"])
        self._reductions = reductions


def _scalar(name: str, value: Any) -> Tensor:
    """Return a value that is logged as a tensor without a graph; refuse what is not one number."""
    value = torch.as_tensor(value) if isinstance(value, (int, float)) or hasattr(value, "__array__") else value
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise StepError(f"self.log({name!r}, ...) was given a value {found}; log one number: value.mean()")
    return value.detach().reshape(())


def _reduction(name: str, given: Any) -> str:
    """Return the name of the function that combines the values of an epoch."""
    found = getattr(given, "__name__", given)
    if found not in ("mean", *_REDUCTIONS):
        raise StepError(f"self.log({name!r}, reduce_fx={given!r}); write 'mean', 'sum', 'max' or 'min'")
    return str(found)


def usable_loader(module: Any, loader: Any) -> Any:
    """Return the loader of a validation; None, and a warning, where the module does not validate."""
    if loader is None or is_overridden(module, "validation_step"):
        return loader
    warn_once(f"{type(module).__name__} has no validation_step: the valid_loader is not used, as in Lightning")
    return None


# ------------------------------------------------------------------------------------------------ state and loaders


def read_state(module: Any, datamodule: Any, place: Mapping[str, int]) -> dict[str, Any]:
    """Return what a checkpoint holds of a module beside its weights: metrics, what is frozen, and its own entries."""
    checkpoint: dict[str, Any] = dict(place)
    module.on_save_checkpoint(checkpoint)
    return {
        "metrics": {name: dict(each.metric_state) for name, each in metrics_in(module)},
        "frozen": [name for name, each in module.named_parameters() if not each.requires_grad],
        "module": {name: value for name, value in checkpoint.items() if name not in place},
        "data": {} if datamodule is None else datamodule.state_dict(),
    }


def load_state(module: Any, datamodule: Any, state: Mapping[str, Any]) -> None:
    """Load what `read_state` returned."""
    for name, each in metrics_in(module):
        for key, value in state["metrics"].get(name, {}).items():
            setattr(each, key, value)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
    module.on_load_checkpoint(dict(state["module"]))
    if datamodule is not None and state["data"]:
        datamodule.load_state_dict(state["data"])


def loader_of(owner: Any, name: str) -> Any:
    """Return what a hook such as ``val_dataloader`` makes: a loader, a dict of several, or None for no validation."""
    if not is_overridden(owner, name):
        if name == "val_dataloader":
            return None
        raise LoaderError(f"neither the module nor a datamodule has {name}; give the loader to the call")
    made = getattr(owner, name)()
    batch = (Tensor, list, tuple, Mapping)
    if isinstance(made, (list, tuple)) and not all(isinstance(each, batch) for each in made):
        made = (
            {f"dataloader_idx_{index}": each for index, each in enumerate(made)} if len(made) > 1 else next(iter(made))
        )
    if type(made).__name__ == "CombinedLoader":
        raise LoaderError(f"{name} returned a CombinedLoader, which is not carried over; return the loaders")
    return made
