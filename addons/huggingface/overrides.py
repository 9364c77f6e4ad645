"""The methods of Transformers' Trainer that a class overrides: those that are called here, and those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from zae.addons.huggingface import optimizers
from zae.addons.huggingface.arguments import library
from zae.addons.huggingface.training import call_by_name
from zae.compose.introspect import AddOnPart, by_name, replaces
from zae.errors import ConfigError, TaskError

__all__ = ["NOT_CALLED", "OverridesPart"]

_DIVIDED = "per_device_train_batch_size and the add-on that divides the ranks, such as FSDPAddon"

NOT_CALLED: Mapping[str, str] = MappingProxyType(
    {
        "training_step": "train_step(batch), which returns {'loss': loss}, or compute_loss(model, inputs)",
        "evaluation_loop": "prediction_step(model, inputs, prediction_loss_only, ignore_keys) for one batch, or "
        "validate(), whose numbers are the metrics of an evaluation in training",
        "get_batch_samples": "micro_batches(batch) for the batches of a step, or count_targets(batch) for what "
        "num_items_in_batch counts",
        "compute_loss_context_manager": "forward_context(), which encloses the loss of a batch",
        "autocast_smart_context_manager": "forward_context(), which encloses the loss of a batch",
        "create_optimizer_and_scheduler": "create_optimizer() and create_scheduler(num_training_steps)",
        "create_accelerator_and_postprocess": "AccelerateAddon, whose option accelerator is the Accelerator",
        "set_initial_training_values": "num_train_epochs or max_steps, options of the trainer",
        "get_total_train_batch_size": _DIVIDED,
        "get_sp_size": _DIVIDED,
        "get_cp_size": _DIVIDED,
        "get_tp_size": _DIVIDED,
        "call_model_init": "model_init, an option of the trainer: the function that makes the model",
        "num_examples": "a dataset whose __len__ is the number",
        "floating_point_ops": "ThroughputAddon, which counts the operations",
        "store_flos": "ThroughputAddon, which counts the operations",
        "init_hf_repo": "hub_model_id and hub_private_repo, options of the trainer",
        "create_model_card": "a file README.md in output_dir, written in on_save(path)",
    }
)
"""Methods that ``transformers.Trainer`` calls and this one does not, and what to write here."""


class OverridesPart(AddOnPart):
    """The part of HuggingFaceAddon that makes the optimizer and the schedule as an override of Transformers says."""

    layer = "model"
    args: Any
    _optimizer_factory: Any
    _schedule_factory: Any

    if TYPE_CHECKING:
        optimizer: Any
        scheduler: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class with an override that Transformers calls and that nothing here would call."""
        super().__init_subclass__(**kwargs)
        for name, remedy in NOT_CALLED.items():
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is not None:
                raise TaskError(
                    f"{owner.__name__}.{name} would never be called: Transformers calls it, HuggingFaceAddon does not. "
                    f"Write {remedy}; or give a method of your own another name"
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        optimizer = self.optimizer
        schedule = self.scheduler
        self._optimizer_factory = optimizer if isinstance(optimizer, optimizers.OptimizerFactory) else None
        self._schedule_factory = schedule if isinstance(schedule, optimizers.ScheduleFactory) else None
        if optimizer is None:  # The trainer evaluates.
            return
        if self._optimizer_factory is None and self._has_override("create_optimizer"):
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}(...) is given, and {type(self).__name__} has create_optimizer, "
                "which makes another one; leave one of them out"
            )
        has_schedule = schedule is not None and self._schedule_factory is None
        if has_schedule and self._has_override("create_scheduler"):
            raise ConfigError(
                f"scheduler={type(schedule).__name__}(...) is given, and {type(self).__name__} has create_scheduler, "
                "which makes another one; leave one of them out"
            )
        self.optimizer, self.scheduler = self._makers()

    def _makers(self, with_optimizer: bool = True) -> tuple[Any, Any]:
        """Return what makes the optimizer and the schedule of a call of ``train()``; what was given stays."""
        optimizer = self.optimizer
        schedule = self.scheduler
        if self._optimizer_factory is not None and with_optimizer:
            makers = ("create_optimizer", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names")
            is_overridden = any(map(self._has_override, makers))
            optimizer = self._make_optimizer if is_overridden else self._optimizer_factory
        if self._has_override("create_scheduler"):
            schedule = self._make_scheduler
        elif self._schedule_factory is not None:
            schedule = self._schedule_factory
        return optimizer, schedule

    @property
    def lr_scheduler(self) -> Any:
        """The schedule, by the name that it has in Transformers."""
        return self.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self.scheduler = schedule

    # ------------------------------------------------------------------------------------ what may be overridden

    @replaces  # Of a class that the add-on is put on, which `_method` calls.
    @by_name
    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the optimizer of a model; override it as in Transformers.

        It is called where no ``optimizer`` was given. ``self.optimizer`` is None then; ``self.args`` has the arguments
        of the optimizer where the trainer was made without ``args``.

        Parameters
        ----------
        model : Module, optional
            The model; by default that of the trainer.

        Returns
        -------
        torch.optim.Optimizer
            What trains; an override may assign it to ``self.optimizer`` instead.
        """
        factory = self._optimizer_factory
        if self.optimizer is None and factory is not None:
            self.optimizer = factory.create(
                cast(Any, self).unwrap() if model is None else model,
                get_decay_parameter_names=self._method("get_decay_parameter_names"),
                get_optimizer_cls_and_kwargs=self._method("get_optimizer_cls_and_kwargs"),
            )
        return self.optimizer

    @replaces
    @by_name
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule, which is stepped after each optimizer step; override it as in Transformers.

        It is called where no ``scheduler`` was given. ``self.lr_scheduler`` is None then.

        Parameters
        ----------
        num_training_steps : int
            Optimizer steps of the run; 0 where a loader without a length leaves them open.
        optimizer : Optimizer, optional
            By default that of the trainer.

        Returns
        -------
        LRScheduler
            What sets the learning rate; an override may assign it to ``self.lr_scheduler`` instead.
        """
        factory = self._schedule_factory
        if self.lr_scheduler is None and factory is not None:
            self.lr_scheduler = factory(self.optimizer if optimizer is None else optimizer, num_training_steps or None)
        return self.lr_scheduler

    @staticmethod
    @replaces
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return the class of the optimizer and its keyword arguments; override it as in Transformers.

        Parameters
        ----------
        args : TrainingArguments
            The arguments, or those of the optimizer.
        model : Module, optional
            The model, which some optimizers need.

        Returns
        -------
        (type, dict)
            ``torch.optim.SGD, {"lr": 0.1}`` for instance.
        """
        pair: tuple[Any, Any] = library().Trainer.get_optimizer_cls_and_kwargs(args, model)
        return pair

    @replaces
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to; override it as in Transformers.

        Parameters
        ----------
        model : Module
            The model.

        Returns
        -------
        list of str
            Names of ``model.named_parameters()``.
        """
        names: list[str] = library().Trainer.get_decay_parameter_names(self, model)
        return names

    # ------------------------------------------------------------------------------------------------- the calls

    def _owner(self, name: str) -> type:
        """Return the class whose method counts: that of a user, wherever it stands, or this part."""
        return next(
            (cls for cls in type(self).__mro__ if name in vars(cls) and cls is not OverridesPart), OverridesPart
        )

    def _has_override(self, name: str) -> bool:
        return self._owner(name) is not OverridesPart

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method of Transformers as it is called here; a class that the add-on is put on counts as well."""
        method: Callable[..., Any] = vars(self._owner(name))[name].__get__(self, type(self))
        return method

    @contextmanager
    def _as_in_transformers(self, factory: Any, **attributes: Any) -> Iterator[None]:
        """Have the attributes that an override finds in Transformers, and put those of zae back."""
        if self.args is None and factory is not None:
            attributes["args"] = factory.args
        before = {name: getattr(self, name) for name in attributes}
        try:
            for name, value in attributes.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def _make_optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer of a model by ``create_optimizer``: the factory of the optimizer."""
        with self._as_in_transformers(self._optimizer_factory, optimizer=None):
            optimizer = call_by_name(self._method("create_optimizer"), model=model)
            return self.optimizer if optimizer is None else optimizer

    def _make_scheduler(self, optimizer: Any, total_steps: int | None) -> Any:
        """Return the schedule of an optimizer by ``create_scheduler``: the factory of the schedule."""
        with self._as_in_transformers(self._schedule_factory, optimizer=optimizer, scheduler=None):
            scheduler = self._method("create_scheduler")(num_training_steps=total_steps or 0)
            return self.scheduler if scheduler is None else scheduler
