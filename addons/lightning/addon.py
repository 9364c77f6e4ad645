"""Train a LightningModule as it is: `task_of` makes the trainer class for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from zae.addon import replaces
from zae.addons.lightning import module as lit
from zae.addons.lightning.attached import AttachedModule
from zae.common import random_state
from zae.errors import StepError, TaskError
from zae.metrics.torchmetrics_values import metrics_in
from zae.trainer import Trainer

if TYPE_CHECKING:
    from zae.loop.step_output import StepOutput

__all__ = ["LightningAddon", "task_of"]


def task_of(module: Any) -> type[Trainer]:
    """Return the trainer class that runs a LightningModule with automatic optimization, unchanged.

    Parameters
    ----------
    module : type or LightningModule
        The class, or an instance, of ``lightning.pytorch`` or ``pytorch_lightning``. It is checked, and not kept: the
        trainer takes the instance, or the class itself, as its model.

    Returns
    -------
    type
        A trainer class, for ``.add_on(...)``. Its constructor takes the module, the options of `zae.Trainer` without
        optimizers and schedulers, which ``configure_optimizers`` makes, and ``datamodule=``.

    Raises
    ------
    TaskError
        The module optimizes manually, or has hooks that cannot be carried over; with what to write.

    Examples
    --------
    >>> import torch
    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> from zae.addons.lightning import task_of
    >>> trainer = task_of(BoringModel)(BoringModel(), device="cpu", log_bar=False)
    >>> metrics = trainer.run(1, [torch.ones(2, 32)] * 4, [torch.ones(2, 32)])
    >>> metrics["step"]
    4
    """
    lit.check_module(module)
    return Trainer.add_on(LightningAddon)


class LightningAddon(AttachedModule):
    """Run the steps, hooks, optimizers and schedulers of a LightningModule; `task_of` makes the class.

    Attributes
    ----------
    datamodule : LightningDataModule or None
        The option of this name.
    callback_metrics : dict of str to Tensor
        The last values of what the module logged, by Lightning's names.
    """

    traits = ("counts_batches",)
    rank_state_attributes = ("_module_state",)

    @replaces
    def build_optimizer(self) -> Any:
        """Return what ``configure_optimizers`` made, once."""
        if isinstance(inspect.unwrap(self.optimizer), lit.Configured):
            with random_state.seeded(self.seed):
                optimizer, self._schedules = lit.parse_optimizers(self.unwrap(), self._call("configure_optimizers"))
            return optimizer
        return super().build_optimizer()

    @replaces
    def build_scheduler(self) -> Any:
        """Return the schedulers that ``configure_optimizers`` made."""
        return self._schedules or None

    # ------------------------------------------------------------------------------------------------------- a step

    def to_device(self, batch: Any) -> Any:
        """Move a batch through the hooks of its transfer."""
        index = self.current_run.loader_place[0]
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            owner = self._of_data(name)
            if lit.is_overridden(owner, name):
                given = (batch, self.device, index) if name.startswith("transfer") else (batch, index)
                batch = getattr(owner, name)(*given)
            elif name.startswith("transfer"):
                batch = super().to_device(batch)
        return batch

    def on_step_begin(self, batch: Any) -> None:
        """Begin to count the batches of a window."""
        super().on_step_begin(batch)
        self._index = 0
        self._outputs = []
        self._last_batch = None
        self._module_log.drop()

    @property
    def _padded_module(self) -> Any:
        """The module where a rank may get a batch that weighs nothing, to take part in the forward of the others."""
        return self.unwrap() if self.engine.needs_lockstep_forward and self.world_size > 1 else None

    @property
    def batch_index(self) -> int:
        """The number of the batch in its epoch, from 0."""
        return self.progress_checker.epoch_batch + self._index

    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Call the hooks around a batch."""
        self._module_log.weight = self.sample_weight(batch, None)
        self._view.begin_batch(self.batch_index)
        if self._hook("on_train_batch_start", batch, self.batch_index) == -1:
            raise StepError(
                "on_train_batch_start returned -1, which would skip the rest of the epoch; write "
                "run(..., steps_per_epoch=...), or self.trainer.should_stop = True"
            )
        self._module_log.mark(self._padded_module)
        values, weight = super().micro_step(batch, count)
        if count > 1:
            self._outputs[-1]["loss"] = self._outputs[-1]["loss"] / count
        self._index += 1
        if self._index < count:
            self._end_batch(batch)
        else:
            self._last_batch = batch
        return values, weight

    def _end_batch(self, batch: Any) -> None:
        self._hook("on_train_batch_end", self._outputs[-1], batch, self.batch_index - 1)

    @replaces
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the loss of ``training_step``."""
        out = self._forward("training_step", batch, self.batch_index)
        if self._index == 0:
            self._hook("on_before_zero_grad", *self.optimizers.values())
        if out is None:
            raise StepError(
                f"{type(self.unwrap()).__name__}.training_step returned None, by which Lightning leaves a batch out; "
                "write return loss. on_nonfinite='skip' leaves out the steps whose loss is not finite"
            )
        values = out if isinstance(out, Mapping) else {"loss": out}
        if isinstance(loss := values.get("loss"), Tensor):
            self._outputs.append({**values, "loss": loss.detach().clone()})
            return {"loss": loss}
        return out  # It is refused with its name.

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Call the hooks around the backward, or the module's own."""
        self._hook("on_before_backward", loss)
        if lit.is_overridden(self.unwrap(), "backward"):
            self._call("backward", loss)
        else:
            super().backward(loss, **kwargs)
        self._hook("on_after_backward")

    def clip(self) -> None:
        """Call ``on_before_optimizer_step``, and ``configure_gradient_clipping`` where the module has its own."""
        for optimizer in self.optimizers.values():
            self._hook("on_before_optimizer_step", optimizer)
            self._hook("configure_gradient_clipping", optimizer, self.gradient_clip or None, None)
        if not lit.is_overridden(self.unwrap(), "configure_gradient_clipping"):
            super().clip()

    def step_one(self, optimizer: Optimizer) -> bool:
        """Step the optimizer as ``optimizer_step`` of the module does."""
        module: Any = self.unwrap()
        if not lit.is_overridden(module, "optimizer_step"):
            return super().step_one(optimizer)
        calls = []

        def closure() -> Any:
            calls.append(1)
            return self._outputs[-1].get("loss") if self._outputs else None

        self._call("optimizer_step", self.module_epoch, self.batch_index - 1, optimizer, closure)
        if not calls:
            raise StepError(
                f"{type(module).__name__}.optimizer_step did not call its closure, which skips batches in Lightning; "
                "here the gradient is there already. Use GradientAccumulationAddon, or the hook should_step"
            )
        return True

    def zero_grad(self) -> None:
        """Call ``optimizer_zero_grad`` of the module within a step."""
        if self._outputs:
            for optimizer in self.optimizers.values():
                self._hook("optimizer_zero_grad", self.module_epoch, self.batch_index - 1, optimizer)
        super().zero_grad()

    @replaces
    def scheduler_step(self, when: str) -> None:
        """Step the schedulers whose interval and frequency it is."""
        self._step_schedules("step" if when == "batch" else "epoch", False)

    def _step_schedules(self, interval: str, by_metric: bool) -> None:
        count = self.batch_index if interval == "step" else self.module_epoch + 1
        for each in self.schedulers.values():
            config = each.config
            if config.interval != interval or config.reduce_on_plateau != by_metric or count % config.frequency:
                continue
            value = self.gather(self.callback_metrics.get(config.monitor))[0] if by_metric else None
            if by_metric and value is None and config.strict:
                raise StepError(
                    f"ReduceLROnPlateau needs the metric {config.monitor!r}, which was not logged; available: "
                    f"{', '.join(self.callback_metrics) or 'none'}"
                )
            if value is not None or not by_metric:
                self._call("lr_scheduler_step", each.scheduler, value)

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Call ``on_train_batch_end`` and record what the module logged."""
        super().on_step_end(outputs)
        # They are counted by now.
        ran = self._index
        self._index = 0
        if len(outputs) < ran:
            self._module_log.rewind()
        elif outputs:
            self._end_batch(self._last_batch)
        self._module_log.commit("train", self.log_train)
        self._step_schedules("step", True)
        self._outputs = []

    # ---------------------------------------------------------------------------------------------- a run, an epoch

    def on_run_begin(self) -> None:
        """Call ``on_fit_start`` and ``on_train_start``."""
        super().on_run_begin()
        self._hook("on_fit_start")
        self._hook("on_train_start")

    def on_run_end(self) -> None:
        """Call ``on_train_end`` and ``on_fit_end``."""
        self._hook("on_train_end")
        self._hook("on_fit_end")
        super().on_run_end()

    def on_epoch_begin(self) -> None:
        """Call ``on_train_epoch_start``, unless the epoch was left open."""
        super().on_epoch_begin()
        if not self.progress_checker.epoch_batch:
            self._hook("on_train_epoch_start")
            self._module_log.commit("train", None)

    def on_epoch_end(self) -> None:
        """Call ``on_train_epoch_end``, add what it logs to the row of the epoch, and step by metrics."""
        self._closing = True
        try:
            self._hook("on_train_epoch_end")
            self._module_log.commit("train", None)
            found = self._module_log.close("train")
            if found:
                self.history.train[-1].update({f"train_{name}": value for name, value in found.items()})
                self.log({f"train/{name}": value for name, value in found.items()}, self.progress_checker.step)
            self._step_schedules("epoch", True)
        finally:
            self._closing = False
        super().on_epoch_end()

    @replaces
    def metric_on_epoch_end(self) -> Mapping[str, float]:
        """Return what the module logged by epoch."""
        if self.mode == "train":
            return self._module_log.close("train")
        place, count = self.current_run.loader_place
        if place == count - 1:
            self._module_log.suffix, suffix = "", self._module_log.suffix
            self._hook(f"on_{self.evaluation_stage or 'validation'}_epoch_end")
            self._module_log.suffix = suffix
            self._module_log.commit("test", None)
            self._has_ended = True
        return self._module_log.close("test")

    # -------------------------------------------------------------------------------------------------- evaluations

    def test(self, loader: Any) -> dict[str, float]:
        """Return the metrics of ``test_step`` over a loader; ``evaluate`` makes ``validation_step``.

        Parameters
        ----------
        loader : iterable, or dict of them
            Batches.

        Returns
        -------
        dict of str to float
            As ``evaluate`` returns them.
        """
        self._stage = "test"
        try:
            return self.evaluate(loader)
        finally:
            self._stage = ""

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Call the hooks around the evaluation of a loader."""
        records = self._module_log
        run = self.current_run
        is_test = self._stage == "test"
        stage = "predict" if run.test_step == "predict_step" else "test" if is_test else "validation"
        before = self.evaluation_stage, self._index, records.suffix, records.weight
        with super().evaluation_context():
            self.evaluation_stage = stage
            self._index = 0
            self._has_ended = False
            place, count = run.loader_place
            records.suffix = f"/dataloader_idx_{place}" if count > 1 else ""
            records.test.clear()
            try:
                if place == 0:
                    self._hook(f"on_{stage}_start")
                    self._hook(f"on_{stage}_epoch_start")
                yield
                if stage == "predict":
                    self._hook("on_predict_epoch_end")
                if stage == "predict" or self._has_ended:
                    self._hook(f"on_{stage}_end")
            finally:
                records.drop()
                self.evaluation_stage, self._index, records.suffix, records.weight = before

    @replaces
    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Make the step of the module for this stage."""
        self._module_log.weight = self.sample_weight(batch, None)
        is_spare = self._padded_module is not None and self.current_run.batch is None
        self._module_log.mark(self._padded_module)
        out = self._evaluate_batch(batch)
        if is_spare:  # Of another rank, which records it.
            self._index -= 1
            self._module_log.rewind()
        elif self._module_log.commit("test", self.log_test):
            return {}
        loss = out.get("loss") if isinstance(out, Mapping) else out
        return {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 else {}

    @replaces
    def predict_step(self, batch: Any) -> Any:
        """Return what ``predict_step`` of the module returns."""
        return self._evaluate_batch(batch)

    def _evaluate_batch(self, batch: Any) -> Any:
        stage = self.evaluation_stage or "validation"
        given = (self._index, self.current_run.loader_place[0])
        if stage != "predict" and not lit.is_overridden(self.unwrap(), f"{stage}_step"):
            raise TaskError(f"{type(self.unwrap()).__name__} has no {stage}_step, which this evaluation calls")
        self._hook(f"on_{stage}_batch_start", batch, *given)
        out = self._forward(f"{stage}_step", batch, *given)
        self._hook(f"on_{stage}_batch_end", out, batch, *given)
        self._index += 1
        return out

    def on_exception(self, error: BaseException) -> None:
        """Call the hook of the data module."""
        if self.datamodule is not None:
            self.datamodule.on_exception(error)
        super().on_exception(error)

    # --------------------------------------------------------------------------------------------------- checkpoints

    @property
    def saved_attributes(self) -> set[str]:
        """The attributes of modules that checkpoints hold, which are metrics and all of a module that saves its own."""
        module: Any = self.unwrap()
        own = vars(module) if lit.is_overridden(module, "on_save_checkpoint") else ()
        metrics = {f"model.{name}.{key}" for name, each in metrics_in(module) for key in each.metric_state}
        return {f"model.{name}" for name in own} | metrics

    @property
    def _module_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the module beside its weights."""
        place = {"epoch": self.module_epoch, "global_step": self.progress_checker.step}
        return {"records": self._module_log.state_dict(), **lit.read_state(self.unwrap(), self.datamodule, place)}

    @_module_state.setter
    def _module_state(self, state: Mapping[str, Any]) -> None:
        self._module_log.load_state_dict(state["records"])
        lit.load_state(self.unwrap(), self.datamodule, state)
