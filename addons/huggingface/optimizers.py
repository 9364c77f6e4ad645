"""Optimizers and learning-rate schedules by the names of Transformers, for any trainer.

Transformers makes both itself: its groups of parameters, its defaults and its schedules, of the installed version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zae.addons.huggingface.arguments import library
from zae.errors import ConfigError, did_you_mean

__all__ = [
    "OptimizerFactory",
    "ScheduleFactory",
    "factories",
    "optimizer",
    "schedule",
]

_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
_OPTIMIZER_ARGUMENTS = (
    "optim",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim_args",
    "optim_target_modules",
    "warmup_steps",
)
_SCHEDULE_ARGUMENTS = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs")


_OF_LENGTH = ("_total", "_ends", "factory")  # Attributes of a `Schedule` that no state has.
_SHOWN = 3  # Names that an error suggests.


def optimizer(optim: str | None = None, **arguments: Any) -> OptimizerFactory:
    """Return a factory of an optimizer of Transformers, to be given to a trainer as ``optimizer=``.

    Weight decay applies to neither biases nor norms, by the rule of ``transformers.Trainer``.

    Parameters
    ----------
    optim : str, optional
        A name of ``transformers.training_args.OptimizerNames``; None is the default of the installed version.
    **arguments : object
        The arguments of ``TrainingArguments`` that optimizers read: ``learning_rate``, ``weight_decay``,
        ``adam_beta1``, ``adam_beta2``, ``adam_epsilon``, ``optim_args``, ``optim_target_modules`` and
        ``warmup_steps`` (schedule-free ones). Those that are left out have its defaults.

    Returns
    -------
    OptimizerFactory
        A function of the model.

    Raises
    ------
    ConfigError, ImportError
        The name or an argument is unknown, or Transformers is not installed.

    Examples
    --------
    >>> import torch
    >>> from zae.addons.huggingface import optimizers
    >>> make = optimizers.optimizer("sgd", learning_rate=0.1, weight_decay=0.01, optim_args="momentum=0.9")
    >>> groups = make(torch.nn.Linear(2, 1)).param_groups
    >>> [(len(group["params"]), group["weight_decay"], group["momentum"]) for group in groups]
    [(1, 0.01, 0.9), (1, 0.0, 0.9)]
    """
    named = {} if optim is None else {"optim": optim}
    factory = OptimizerFactory(_defaults(_OPTIMIZER_ARGUMENTS, {**named, **arguments}, "optimizer"))
    _check_optimizer(factory.args)
    return factory


def schedule(lr_scheduler_type: str | None = None, **arguments: Any) -> ScheduleFactory:
    """Return a factory of a schedule of Transformers, to be given to a trainer as ``scheduler=``.

    The trainer calls it with the optimizer steps of the run, and steps it after each of them.

    Parameters
    ----------
    lr_scheduler_type : str, optional
        A name of ``transformers.SchedulerType``; None is the default of the installed version.
    **arguments : object
        ``warmup_steps``, steps (a number of at least 1) or the share of the run (less than 1), and
        ``lr_scheduler_kwargs``, a dict of what the schedule takes beside them.

    Returns
    -------
    ScheduleFactory
        A function of the optimizer and ``total_steps``.

    Raises
    ------
    ConfigError
        The name or an argument is unknown.

    Examples
    --------
    >>> import torch
    >>> from zae.addons.huggingface import optimizers
    >>> make = optimizers.schedule("linear", warmup_steps=0.5)
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule, rates = make(optimizer, total_steps=4), []
    >>> for _ in range(4):
    ...     rates += schedule.get_last_lr()
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.0, 0.5, 1.0, 0.5]
    """
    named = {} if lr_scheduler_type is None else {"lr_scheduler_type": lr_scheduler_type}
    factory = ScheduleFactory(_defaults(_SCHEDULE_ARGUMENTS, {**named, **arguments}, "schedule"))
    _check_schedule(factory.args)
    return factory


def factories(args: Any) -> tuple[OptimizerFactory, ScheduleFactory]:
    """Return the factories of the optimizer and the schedule of a ``TrainingArguments``."""
    optimizer_factory = optimizer(**{name: getattr(args, name) for name in _OPTIMIZER_ARGUMENTS})
    return optimizer_factory, schedule(**{name: getattr(args, name) for name in _SCHEDULE_ARGUMENTS})


@dataclasses.dataclass(frozen=True)
class OptimizerFactory:
    """Make an optimizer of a model by the arguments of Transformers; see `optimizer`.

    A class with its arguments, ``optimizer_cls_and_kwargs`` of Transformers, takes the place of the name; the groups of
    parameters are the same.
    """

    args: Any
    cls_and_kwargs: tuple[Any, Mapping[str, Any]] | None = None

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer that ``transformers.Trainer(model, args)`` would create."""
        return self.create(model)

    def create(self, model: nn.Module, **methods: Any) -> Optimizer:
        """Return the optimizer, with methods in the place of those of ``transformers.Trainer``."""
        transformers = library()

        args = self.args
        _check_optimizer(args)
        # A trainer without its constructor, which would want data and move the model.
        trainer: Any = object.__new__(transformers.Trainer)
        pair = None if self.cls_and_kwargs is None else (self.cls_and_kwargs[0], dict(self.cls_and_kwargs[1]))
        vars(trainer).update(methods, model=model, args=args, optimizer=None, optimizer_cls_and_kwargs=pair)
        try:
            optimizer: Optimizer = trainer.create_optimizer()
        except (ImportError, TypeError, ValueError) as error:
            option = f"optim={_name(args.optim)!r}" if pair is None else f"optimizer_cls_and_kwargs={pair!r}"
            raise ConfigError(f"{option} cannot be made: {error}") from error
        return optimizer

    def __repr__(self) -> str:
        if self.cls_and_kwargs is not None:
            return f"optimizer_cls_and_kwargs=({self.cls_and_kwargs[0].__name__}, {dict(self.cls_and_kwargs[1])})"
        return _written("optimizer", self.args, _OPTIMIZER_ARGUMENTS)


@dataclasses.dataclass(frozen=True)
class ScheduleFactory:
    """Make a schedule of an optimizer by the arguments of Transformers; see `schedule`."""

    args: Any
    steps_on_batch: ClassVar[bool] = True

    def __call__(self, optimizer: Optimizer, total_steps: int | None) -> Any:
        """Return the schedule that Transformers would create for a run of so many steps; None is unknown."""
        transformers = library()

        args = self.args
        _check_schedule(args)
        name = _name(args.lr_scheduler_type)
        warmup = args.warmup_steps
        if total_steps is None and name != "reduce_lr_on_plateau" and (name not in _ENDLESS or 0 < warmup < 1):
            raise ConfigError(
                f"lr_scheduler_type={name!r} needs the number of optimizer steps of the run, which is not known: the "
                "loader has no length; write run(..., max_steps=1000) or run(..., steps_per_epoch=100)"
            )
        total = total_steps or 0
        kwargs = args.lr_scheduler_kwargs
        lengths = {"num_warmup_steps": _warmup_steps(args, total), "num_training_steps": total}
        try:
            scheduler = transformers.get_scheduler(name, optimizer, scheduler_specific_kwargs=kwargs, **lengths)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={kwargs!r} cannot be made: {error}"
            ) from error
        return Schedule(scheduler, total, name not in _ENDLESS, self) if isinstance(scheduler, LambdaLR) else scheduler

    def __repr__(self) -> str:
        return _written("schedule", self.args, _SCHEDULE_ARGUMENTS)


class Schedule(LambdaLR):
    """A schedule of Transformers that says how long it is, and that it counts optimizer steps."""

    steps_on_batch = True

    def __init__(self, lambdas: LambdaLR, total: int, ends: bool, factory: ScheduleFactory) -> None:
        self._total = total
        self._ends = ends
        self.factory = factory
        super().__init__(lambdas.optimizer, lambdas.lr_lambdas)

    @property
    def total_iters(self) -> int | None:
        """The steps of the run."""
        return self._total if self._ends else None

    @property
    def ends(self) -> bool:
        """Whether it must not be stepped further."""
        return self._ends

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the length: a resumed run may be longer, as it may be in Transformers."""
        return {name: value for name, value in super().state_dict().items() if name not in _OF_LENGTH}


def _check_optimizer(args: Any) -> None:
    """Refuse an optimizer that Transformers does not know, or that steps within backward."""
    from transformers.training_args import OptimizerNames

    name = _name(args.optim)
    known_names = [kind.value for kind in OptimizerNames]
    if name not in known_names:
        near = [
            known_name
            for known_name in known_names
            if known_name.replace("_", "").startswith(name.lower().replace("_", ""))
        ]
        hint = f"; did you mean {' or '.join(map(repr, near[:_SHOWN]))}?" if near else did_you_mean(name, known_names)
        raise ConfigError(f"unknown optim={name!r}{hint or '; it is one of ' + ', '.join(known_names)}")
    if name.endswith("_layerwise") or "lomo" in name:
        plain_name = name.removesuffix("_layerwise")
        raise ConfigError(
            f"optim={name!r} changes the weights within backward, before gradients are clipped and checked; write "
            f"optim={plain_name if plain_name != name else 'adafactor'!r}"
        )


def _check_schedule(args: Any) -> None:
    """Refuse an unknown schedule, and those that cannot be stepped by a trainer."""
    from transformers import SchedulerType

    name = _name(args.lr_scheduler_type)
    known_names = [kind.value for kind in SchedulerType]
    if name not in known_names:
        near = did_you_mean(name, known_names) or "; it is one of " + ", ".join(known_names)
        raise ConfigError(f"unknown lr_scheduler_type={name!r}{near}")
    if name == "greedy":
        raise ConfigError(
            "lr_scheduler_type='greedy' is not a torch scheduler; write lr_scheduler_type='reduce_lr_on_plateau', or "
            "step it in on_validation_end"
        )
    if not isinstance(args.warmup_steps, (int, float)) or args.warmup_steps < 0:
        raise ConfigError(f"warmup_steps={args.warmup_steps!r}; write a number of steps, or a share such as 0.1")
    if not isinstance(args.lr_scheduler_kwargs, (Mapping, type(None))):
        raise ConfigError(
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}; write a dict, such as {{'num_cycles': 2}}"
        )


def _warmup_steps(args: Any, total: int) -> int:
    """Return the steps of the warm-up, as ``TrainingArguments.get_warmup_steps`` does."""
    from transformers import TrainingArguments

    return TrainingArguments.get_warmup_steps(args, total)


def _defaults(names: tuple[str, ...], arguments: Mapping[str, Any], function: str) -> Any:
    """Return some arguments with the defaults of the installed version, where they are not given."""
    transformers = library()
    from transformers.training_args import ParallelMode

    for name in arguments:
        if name not in names:
            near = did_you_mean(name, names) or "; it has " + ", ".join(names)
            raise ConfigError(f"unknown argument {name!r} for optimizers.{function}{near}")
    fields = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    values = {name: arguments.get(name, fields[name]) for name in names}
    return SimpleNamespace(**values, gradient_accumulation_steps=1, parallel_mode=ParallelMode.NOT_PARALLEL)


def _name(value: Any) -> str:
    """Return the name of an entry of an enumeration of Transformers, or of a str."""
    return str(getattr(value, "value", value))


def _written(function: str, args: Any, names: tuple[str, ...]) -> str:
    """Return a factory as it is written in a script."""
    first, *other_names = names
    options = {name: getattr(args, name) for name in other_names}
    arguments = [
        repr(_name(getattr(args, first))),
        *(f"{name}={value!r}" for name, value in options.items() if value),
    ]
    return f"zae.addons.huggingface.optimizers.{function}({', '.join(arguments)})"
