"""What a LightningModule finds as ``self.trainer`` and ``self.logger``; other names raise with what to write."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zae.compose.foreign_names import counterpart
from zae.compose.introspect import with_trait
from zae.errors import ConfigError, MissingError
from zae.loop.progress import NO_LIMIT

__all__ = ["LoggerView", "PlanView", "TrainerView", "warn_once"]

_log = logging.getLogger("zae")


@cache
def warn_once(text: str) -> None:
    """Warn the first time."""
    _log.warning(text)


def _explain(view: Any, name: str, verb: str) -> str:
    """Say of a name of Lightning's trainer that it is not here, and what to write."""
    here = counterpart(name)
    names = ", ".join(each for each in dir(view) if not each.startswith("_"))
    remedy = f"outside of the module it is {here}" if here else f"self.trainer has {names}"
    what = "cannot be set" if verb == "sets" else "is not here"
    return f"the module {verb} self.trainer.{name}, which {what}; {remedy}"


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return math.inf


class LoggerView:
    """What a LightningModule finds as ``self.logger`` where the trainer has a logger add-on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def experiment(self) -> Any:
        """The client of the first logger that has one, for instance the SummaryWriter; one that is silent elsewhere."""
        trainer = self._trainer
        if trainer.is_main and not trainer.clients:
            warn_once(
                "self.logger.experiment has no client: what is logged to it is dropped. There is one within run(), of "
                "TensorBoardLoggerAddon or WandBLoggerAddon for instance"
            )
        return next(iter(trainer.clients.values()), _Silent())

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass a record to the loggers."""
        self._trainer.log(dict(metrics), self._trainer.progress_checker.step if step is None else step)

    def log_hyperparams(self, params: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Pass hyperparameters to the loggers, as a record."""
        given = dict(params) if isinstance(params, Mapping) else vars(params)
        self.log_metrics({**{f"hparams/{name}": value for name, value in given.items()}, **(metrics or {})})

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Pass images to the loggers."""
        for index, image in enumerate(images):
            self._trainer.log_image(f"{key}/{index}" if len(images) > 1 else key, image, step)

    def __getattr__(self, name: str) -> Any:
        raise MissingError(
            f"the module reads self.logger.{name}, which is not here; self.logger has experiment, log_metrics, "
            "log_hyperparams and log_image"
        )


class _Silent:
    """Takes any call and does nothing, as Lightning's own on the other ranks."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class TrainerView:
    """What a LightningModule finds as ``self.trainer``: it reads the trainer, and stops it by ``should_stop``."""

    progress_bar_callback = None
    sanity_checking = False
    fast_dev_run = False
    is_last_batch = False

    def __init__(self, trainer: Any = None) -> None:
        vars(self)["_trainer"] = (lambda: None) if trainer is None else weakref.ref(trainer)

    @property
    def _of(self) -> Any:
        trainer = self._trainer()
        if trainer is None:
            raise RuntimeError("this LightningModule is not part of a trainer any more; it was copied or unpickled")
        return trainer

    global_step = property(lambda self: self._of.progress_checker.step)
    current_epoch = property(lambda self: self._of.module_epoch)
    is_global_zero = property(lambda self: self._of.is_main)
    world_size = property(lambda self: self._of.world_size)
    num_devices = world_size
    global_rank = property(lambda self: self._of.rank)
    local_rank = global_rank
    model = property(lambda self: self._of.model)
    datamodule = property(lambda self: self._of.datamodule)
    optimizers = property(lambda self: list(self._of.optimizers.values()))
    lr_scheduler_configs = property(lambda self: [each.config for each in self._of.schedulers.values()])
    callback_metrics = property(lambda self: self._of.callback_metrics)
    logged_metrics = callback_metrics
    gradient_clip_val = property(lambda self: self._of.gradient_clip or None)
    accumulate_grad_batches = property(lambda self: self._of.step_window.batches)
    train_dataloader = property(lambda self: self._of.current_run.user_loader)
    val_dataloaders = property(lambda self: self._of.current_run.valid_loader)
    num_val_batches = property(lambda self: self._lengths("validation"))
    num_test_batches = property(lambda self: self._lengths("test"))
    num_predict_batches = property(lambda self: self._lengths("predict"))
    logger = property(lambda self: LoggerView(self._of) if with_trait(type(self._of), "writes_records") else None)
    loggers = property(lambda self: [each for each in (self.logger,) if each is not None])
    training = property(lambda self: self._of.evaluation_stage == "")
    validating = property(lambda self: self._of.evaluation_stage == "validation")
    testing = property(lambda self: self._of.evaluation_stage == "test")
    predicting = property(lambda self: self._of.evaluation_stage == "predict")
    max_epochs = property(lambda self: self._last(0))
    max_steps = property(lambda self: self._last(1))

    def _last(self, place: int) -> int:
        """Return the epoch, or the step, at the end of this call of ``run``; -1 without a limit."""
        run = self._of.current_run
        last: int = (run.extent.last_epoch, run.extent.last_step)[place]
        if last == NO_LIMIT and run.is_call:  # It is being set up.
            last = run.extent.end_of_call()[place]
        return -1 if last == NO_LIMIT else last

    @property
    def estimated_stepping_batches(self) -> float:
        """The optimizer steps that the call of ``run`` is planned to take."""
        try:
            found = self._of.current_run.extent.total_steps()
        except ConfigError:
            raise ConfigError(
                "self.trainer.estimated_stepping_batches is known only within run(); call run first, or load the state "
                "in it, by resume=..."
            ) from None
        return math.inf if found is None else found

    @property
    def num_training_batches(self) -> float:
        """The batches of an epoch."""
        return _length(self._of.current_run.loader)

    def _lengths(self, stage: str) -> list[float]:
        """Return the batches of each loader of a kind of evaluation."""
        run = self._of.current_run
        loaders = run.valid_loader if stage == "validation" else None
        if loaders is None and self._of.evaluation_stage == stage:
            loaders = run.current_loader
        given = loaders.values() if isinstance(loaders, Mapping) else [] if loaders is None else [loaders]
        return [_length(each) for each in given]

    def begin_batch(self, index: int) -> None:
        """Note which batch of the epoch begins, for ``is_last_batch``."""
        vars(self)["is_last_batch"] = index + 1 >= self.num_training_batches

    should_stop = property(lambda self: bool(self._of.should_stop))

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "should_stop":
            raise MissingError(_explain(self, name, "sets"))
        if value:
            self._of.stop("the module set self.trainer.should_stop")

    def __getattr__(self, name: str) -> Any:
        raise MissingError(_explain(self, name, "reads"))

    def get_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, as ``LightningModule.optimizers``."""
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer, as ``LightningModule.clip_gradients``."""
        value = gradient_clip_val or self.gradient_clip_val
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if value and str(gradient_clip_algorithm or "norm").endswith("value"):
            nn.utils.clip_grad_value_(parameters, value)
        elif value:
            nn.utils.clip_grad_norm_(parameters, value)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return a tensor of all ranks, stacked, as ``LightningModule.all_gather``."""
        parts = self._of.gather(data)
        return data if len(parts) == 1 else torch.stack([each.to(data.device) for each in parts])

    def __deepcopy__(self, memo: Any) -> TrainerView:
        return self

    def __reduce__(self) -> Any:
        return TrainerView, ()


class PlanView(TrainerView):
    """What a module finds where its optimizer is made for a plan of a run that has not begun: any length will do."""

    estimated_stepping_batches = property(lambda self: 1000)
    max_epochs = 1000
    max_steps = 1000
