"""What is read of a LightningModule: its hooks, its optimizers, and what it logs."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zae.common.copying import deep_copy
from zae.common.torch_private import last_metric_value
from zae.common.walk import copy_of
from zae.errors import ConfigError, LoaderError, StepError, TaskError, kind_of
from zae.interop.lightning.view import TrainerView
from zae.interop.torchmetrics import metrics_in
from zae.loop.epoch_log import EpochLog
from zae.loop.history import split_prefix

__all__ = [
    "Configured", "Records", "Schedule", "base_of", "call", "check_class", "check_module", "is_overridden",
    "load_state", "loader_of", "parse_optimizers", "read_state", "usable_loader",
    "warn_once",
]  # fmt: skip

_log = logging.getLogger("zae")
_PACKAGES = ("lightning", "pytorch_lightning")
_SHAPES = "an optimizer, ([optimizer], [scheduler]), or {'optimizer': ..., 'lr_scheduler': ...}"
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max, "min": min}
_MANUAL = (
    "optimizes manually (self.automatic_optimization = False); write a zae task: class Task(Trainer) with train_step, "
    "which may return a dict with one loss for each optimizer"
)
_REFUSED = {
    "configure_callbacks": "callbacks of Lightning are not run here; use add-ons, EarlyStoppingAddon for instance",
    "configure_sharded_model": "write it as configure_model, or use FSDPAddon",
    "training_epoch_end": "write it as on_train_epoch_end",
    "validation_epoch_end": "write it as on_validation_epoch_end",
    "test_epoch_end": "write it as on_test_epoch_end",
    **dict.fromkeys(
        [f"on_{stage}_model_{what}" for stage in ("validation", "test", "predict") for what in ("eval", "train")],
        "zae switches the modes of all modules itself, and restores each; set them in train() and eval() of the module",
    ),
    "on_validation_model_zero_grad": "gradients are dropped after each step here; leave it out",
}
_STEP_HOOKS = {
    "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "optimizer_zero_grad", "backward",
    "configure_gradient_clipping", "lr_scheduler_step",
}  # fmt: skip
_EPOCH_HOOKS = {"on_train_start", "on_train_epoch_start", "on_train_epoch_end"} | {
    hook.format(stage)
    for stage in ("validation", "test")
    for hook in (
        "{}_step", "on_{}_start", "on_{}_epoch_start", "on_{}_batch_start", "on_{}_batch_end", "on_{}_epoch_end"
    )
}  # fmt: skip


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
    for name, cure in _REFUSED.items():
        if is_overridden(cls, name):
            raise TaskError(f"{cls.__name__}.{name} cannot be carried over: {cure}")
    training_step: Any = getattr(cls, "training_step")  # noqa: B009
    if getattr(cls, "automatic_optimization", True) is False:
        raise TaskError(f"{cls.__name__} {_MANUAL}")
    given = inspect.signature(training_step).parameters
    for name in ("dataloader_iter", "optimizer_idx"):
        if name in given:
            raise TaskError(
                f"{cls.__name__}.training_step takes {name}, which is not carried over; write "
                "def training_step(self, batch, batch_idx)"
            )


def check_module(module: Any) -> None:
    """Refuse a module, or a class of modules, that cannot run here."""
    is_instance = base_of(type(module)) is not None
    check_class(type(module) if is_instance else module)
    if is_instance and not module.automatic_optimization:
        raise TaskError(f"{type(module).__name__} {_MANUAL}")


# --------------------------------------------------------------------------------------------------------- optimizers


class Schedule:
    """A scheduler of ``configure_optimizers``, with when it is stepped and by which metric."""

    def __init__(
        self,
        scheduler: Any,
        interval: str = "epoch",
        frequency: int = 1,
        monitor: str | None = None,
        strict: bool = True,
        name: str | None = None,
        reduce_on_plateau: bool | None = None,
    ) -> None:
        self.scheduler, self.interval, self.frequency = scheduler, interval, frequency
        self.monitor, self.strict, self.name = monitor, strict, name
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.reduce_on_plateau = is_plateau if reduce_on_plateau is None else reduce_on_plateau
        if interval not in ("step", "epoch"):
            raise ConfigError(f"configure_optimizers returned interval={interval!r}; write 'step' or 'epoch'")
        if self.reduce_on_plateau and monitor is None:
            raise ConfigError(
                "configure_optimizers returned a ReduceLROnPlateau without a metric; write {'optimizer': optimizer, "
                "'lr_scheduler': {'scheduler': scheduler, 'monitor': 'val_loss'}}"
            )

    @classmethod
    def parse(cls, given: Any, monitor: str | None) -> Schedule:
        """Return the schedule for a scheduler, or a dict with one."""
        if not isinstance(given, Mapping):
            return cls(given, monitor=monitor)
        known = inspect.signature(cls).parameters
        if wrong := [name for name in given if name not in known]:
            raise ConfigError(
                f"configure_optimizers returned a scheduler with {wrong[0]!r}; it takes {', '.join(known)}"
            )
        if "scheduler" not in given:
            raise ConfigError("configure_optimizers returned a dict without 'scheduler'; write {'scheduler': ..., ...}")
        return cls(**given)

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
        return self.interval == "step"

    def step(self) -> None:
        """Step it where that needs no metric, as a plan of the learning rates does."""
        if not self.reduce_on_plateau:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the scheduler."""
        self.scheduler.load_state_dict(dict(state))


def parse_optimizers(given: Any) -> tuple[Optimizer, list[Schedule]]:
    """Return the optimizer and the schedules that ``configure_optimizers`` returned, in any documented shape."""
    monitor, schedulers, optimizers = None, [], given
    is_several = isinstance(given, (list, tuple))
    if is_several and len(given) == 2 and isinstance(given[0], (list, tuple)):
        optimizers, schedulers = given
        schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    elif isinstance(given, Mapping) or (is_several and given and all(isinstance(each, Mapping) for each in given)):
        rows = [given] if isinstance(given, Mapping) else given
        if "frequency" in rows[0] or any("optimizer" not in row for row in rows):
            raise ConfigError(f"configure_optimizers returned a dict with {', '.join(rows[0])}; return {_SHAPES}")
        optimizers, monitor = [row["optimizer"] for row in rows], rows[0].get("monitor")
        schedulers = [row["lr_scheduler"] for row in rows if row.get("lr_scheduler") is not None]
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if len(optimizers) > 1 and all(isinstance(each, Optimizer) for each in optimizers):
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers, which need manual optimization; write a zae "
            "task with optimizer={'a': ..., 'b': ...} and a train_step that returns a loss for each"
        )
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        found = kind_of(given) if len(optimizers) == 1 else f"{len(optimizers)} values"
        raise ConfigError(f"configure_optimizers returned {found}; return {_SHAPES}")
    return optimizers[0], [Schedule.parse(each, monitor) for each in schedulers]


class Configured:
    """Stands for the optimizer until ``configure_optimizers`` is called, when the run knows its length."""

    def __init__(self, module: Any, view: TrainerView) -> None:
        self.module, self.view = module, view

    def __call__(self, parameters: Any) -> Optimizer:
        """Return the optimizer of a copy of the module, for a plan of the run."""
        module = deep_copy(self.module)
        module.trainer = self.view.plan_view()
        return parse_optimizers(module.configure_optimizers())[0]


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

    def __init__(self) -> None:
        self.callback_metrics: dict[str, Tensor] = {}
        self.train, self.test = EpochLog("log_train", keeps=False), EpochLog("log_test", keeps=False)
        self.hook, self.suffix, self.weight = "", "", 1.0
        self._mark: tuple[int, int, list[Any]] = (0, 0, [])
        self._step: list[tuple[str, Any, float]] = []
        self._epoch: list[tuple[str, Any, float]] = []
        self._reductions: dict[str, list[str]] = {}
        """For each name of an epoch, how its values are combined, and the name without "_epoch"."""
        self._metrics: dict[str, Any] = {}

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: Any = "mean", enable_graph: bool = False, sync_dist: bool = False,
        sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: int | None = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Record a value, as ``LightningModule.log``; the values of an epoch are those of all ranks in any case."""
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
            value, by_epoch = (last_metric_value(value) if by_step else None), False
        self._reductions[epoch_name + suffix] = [_reduction(name, reduce_fx), name + suffix]
        if value is None:
            return
        value = _scalar(name, value)
        weight = self.weight if batch_size is None or not self.weight else float(batch_size)
        if by_step:
            self._step.append((step_name + suffix, value, weight))
            self.callback_metrics |= {step_name + suffix: value, name + suffix: value}
        if by_epoch:
            self._epoch.append((epoch_name + suffix, value, weight))

    def commit(self, split: str, log: EpochLog | None) -> bool:
        """Add the values of a step to the logs of a split; return whether there were any."""
        waiting, self._step, own, self._epoch = self._step, [], self._epoch, []
        for name, value, weight in own:
            getattr(self, split).record({name: value}, weight)
        for name, value, weight in waiting if log is not None else ():
            log.record({split_prefix(name)[1]: value}, weight)  # type: ignore[union-attr]
        return bool(waiting or own)

    def mark(self, module: Any) -> None:
        """Remember what is waiting, and the metrics of a module, for `rewind`."""
        metrics = [*metrics_in(module)] if module is not None else []
        states = [
            (metric, {key: copy_of(value) for key, value in metric.metric_state.items()}) for _, metric in metrics
        ]
        self._mark = len(self._step), len(self._epoch), states

    def rewind(self) -> None:
        """Forget what was logged since the mark: it is that of a batch that weighs nothing."""
        steps, epochs, states = self._mark
        del self._step[steps:], self._epoch[epochs:]
        for metric, state in states:
            for key, value in state.items():
                setattr(metric, key, value)

    def drop(self) -> None:
        """Drop the values of a step that was not completed."""
        self._step, self._epoch = [], []

    def close(self, split: str, trainer: Any) -> dict[str, float]:
        """Return what was logged of an epoch on all ranks, by its names without the split, and clear its log."""
        log: EpochLog = getattr(self, split)
        whole, metrics = log.over_ranks(trainer.gather_data, trainer.data_size), self._metrics
        if trainer.world_size > 1:  # A rank without batches has logged nothing.
            modules = dict(metrics_in(trainer.unwrap()))
            names = {id(each): name for name, each in modules.items()}
            for reductions, found in trainer.gather((self._reductions, {n: names[id(m)] for n, m in metrics.items()})):
                self._reductions |= reductions
                metrics |= {name: modules[where] for name, where in found.items()}
        values = whole.means()
        for name in values:
            if (reduction := self._reductions[name][0]) != "mean":
                values[name] = _REDUCTIONS[reduction](whole[name])
        for name, metric in sorted(metrics.items()):
            values[name] = float(_scalar(name, metric.compute()))
        for metric in metrics.values():
            metric.reset()
        self._metrics = {}
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
        self.callback_metrics, self._reductions = dict(state["last"]), dict(state["reductions"])


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


@cache
def warn_once(text: str) -> None:
    """Warn the first time."""
    _log.warning(text)


# ------------------------------------------------------------------------------------------------ state and loaders


class _Checkpoint(dict[str, Any]):
    """What ``on_save_checkpoint`` and ``on_load_checkpoint`` get: their own entries, and the place of the run."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"checkpoint[{key!r}] is not carried over: zae saves weights and optimizers itself; add and read entries "
            "of your own here"
        )


def read_state(module: Any, datamodule: Any, place: Mapping[str, int]) -> dict[str, Any]:
    """Return what a checkpoint holds of a module beside its weights: metrics, what is frozen, and its own entries."""
    checkpoint = _Checkpoint(place)
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
    module.on_load_checkpoint(_Checkpoint(state["module"]))
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
