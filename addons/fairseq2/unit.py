"""Train a unit of fairseq2, or one that is written like it: `task_of` makes the trainer class for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zae.addon import AddOnBase, replaces
from zae.addons.fairseq2.metric_bag import check_names, compute_over_ranks, metrics_of, reset, states_of
from zae.addons.fairseq2.regime import RegimeAddon
from zae.errors import ConfigError, StepError, TaskError, kind_of
from zae.loop.evaluation import Evaluation
from zae.loop.metric_rows import split_prefix
from zae.optim.gradients import total_targets
from zae.parts import gather_dp
from zae.trainer import Trainer

__all__ = ["TrainUnitAddon", "check_unit", "task_of"]

_DEPTH = 2  # A unit may hold its model in an object of its own, such as a criterion.


def task_of(unit: Any) -> type[Trainer]:
    """Return the trainer class that trains a unit, unchanged.

    A unit has ``unit(batch) -> (loss, num_targets)`` with the sum of the losses of all targets (with ``num_targets``
    None, gradients are added and not divided), ``unit.model``, and, if it likes, ``unit.set_step_nr(step_nr)`` and
    ``unit.metric_bag``. It needs no base class.

    Parameters
    ----------
    unit : object
        The unit. It is checked, and not kept: the trainer takes it in place of a model.

    Returns
    -------
    type
        A trainer class, for ``.add_on(...)``. Its constructor takes the unit, the options of `zae.Trainer`, and
        ``valid_units=``.

    Raises
    ------
    TaskError
        The object is not a unit, or no attribute of it holds its model.

    Examples
    --------
    >>> import torch
    >>> from zae.addons.fairseq2 import task_of
    >>> class Unit:
    ...     def __init__(self, model):
    ...         self.model = model
    ...     def __call__(self, batch):
    ...         return self.model(batch).square().sum(), len(batch)
    >>> unit = Unit(torch.nn.Linear(2, 1))
    >>> optimizer = torch.optim.SGD(unit.model.parameters(), lr=0.1)
    >>> trainer = task_of(unit)(unit, "cpu", optimizer=optimizer, log_bar=False)
    >>> trainer.run(1, [torch.ones(4, 2)] * 3)["step"]
    3
    """
    check_unit("unit", unit)
    return Trainer.add_on(TrainUnitAddon)


class TrainUnitAddon(AddOnBase):
    """Call a unit in each step; `task_of` makes the class.

    The unit calls what the engine has put around the model: DistributedDataParallel is not bypassed. Gradients are
    those of the sum of all losses of a step, over its micro-batches and ranks, divided by the number of its targets.
    Metrics of ``metric_bag`` are recorded at the end of each epoch, computed over all ranks, and reset.

    Parameters
    ----------
    train_unit : object
        The unit; what is given in place of the model.
    valid_units : object or dict of str to object, optional
        What evaluates a batch: a unit that returns ``(loss, num_targets)``, or None where it only updates its
        ``metric_bag``. A dict has the unit of each loader of ``run(..., valid_loader={...})`` by the same name. By
        default, the unit that is trained.

    Raises
    ------
    ConfigError
        ``valid_units`` does not hold units of this model.
    """

    layer = "model"
    rank_state_attributes = ("metric_bag_state",)
    _model_places: list[Any]

    def __init__(self, *args: Any, train_unit: Any = None, valid_units: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if train_unit is None:
            raise ConfigError(f"the model is {kind_of(self.unwrap())}; give the unit in its place: task_of(unit)(unit)")
        self.train_unit = train_unit
        self.valid_units = {"": train_unit} if valid_units is None else _by_name(valid_units)
        units = {id(valid_unit): valid_unit for valid_unit in (train_unit, *self.valid_units.values())}
        for name, valid_unit in self.valid_units.items():
            if valid_unit.model is not train_unit.model:
                which = f"valid_units[{name!r}]" if name else "valid_units"
                raise ConfigError(f"the model of {which} is not unit.model; make both units of one model")
        self._model_places = [place for unit in units.values() for place in _places_of(unit, train_unit.model)]

    @classmethod
    def expand_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Take the model out of a unit that is given in its place."""
        expanded = super().expand_options(options)
        if expanded.get("model") is not None and not isinstance(expanded["model"], nn.Module):
            check_unit("unit", expanded["model"])
            expanded["train_unit"] = expanded["model"]
            expanded["model"] = expanded["train_unit"].model
        return expanded

    # ------------------------------------------------------------------------------------------------------- a step

    def on_step_begin(self, batch: Any) -> None:
        """Tell the unit the number of the step, from 1."""
        super().on_step_begin(batch)
        _set_step(self.train_unit, self.progress_checker.step + 1)

    @replaces
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the mean loss and the number of targets."""
        return self._parse(self.train_unit, self._call(self.train_unit, batch), "")

    @replaces
    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Call the unit of the loader that is evaluated."""
        unit = self._valid_unit
        out = self._call(unit, batch)
        return {} if out is None else self._parse(unit, out, "valid_units: ")

    @replaces
    def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
        """Return the sum of the losses of a batch, as the unit did; None targets leave the loss as it is."""
        return loss if num_targets is None else loss * num_targets

    @replaces
    def normalize(self, num_targets: list[Any]) -> None:
        """Multiply the gradients by the number of ranks over that of the targets of all, as fairseq2 does."""
        ranks = self.world_size if self.engine.dp_world_size > 1 else 1  # Those of one share count the same targets.
        if (total := total_targets(num_targets, self.reduce, ranks)) is None:
            return
        for parameter in self.optimization.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(ranks / total)

    def _call(self, unit: Any, batch: Any) -> Any:
        """Call a unit while the attributes that hold the model hold what an engine has put around it."""
        whole = self.unwrap()
        try:
            for owner, name in self._model_places:
                vars(owner)[name] = self.model
            return unit(batch)
        finally:
            for owner, name in self._model_places:
                vars(owner)[name] = whole

    def _parse(self, unit: Any, out: Any, where: str) -> Mapping[str, Any]:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise StepError(f"{where}{type(unit).__name__} returned {kind_of(out)}; return (loss, num_targets)")
        loss, count = out
        if isinstance(loss, Tensor) and loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # So that the derivative of the sum is exactly 1.
        return {"loss": loss} if count is None else {"loss": loss / max(count, 1), "num_targets": count}

    @property
    def _valid_unit(self) -> Any:
        name = self.current_run.activity.evaluation.loader_name
        if len(self.valid_units) == 1:
            return next(iter(self.valid_units.values()))
        if name not in self.valid_units:
            shown = "{" + ", ".join(f"{valid_unit!r}: loader" for valid_unit in self.valid_units) + "}"
            raise ConfigError(f"valid_units has no unit for the loader {name!r}; write valid_loader={shown}")
        return self.valid_units[name]

    # ------------------------------------------------------------------------------------------------------- metrics

    @contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Reset the metrics of the training unit, unless the epoch is continued, or they are published by steps."""
        if not self.progress_checker.epoch_batch and not self._is_published:
            reset(self.train_unit)
        with super().epoch_context():
            yield

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Reset the metrics of the unit that evaluates; those that the training unit counts in its epoch stay."""
        unit = self._valid_unit
        training = self.metric_bag_state
        _set_step(unit, self.progress_checker.step)
        reset(unit)
        try:
            with super().evaluation_context():
                yield
        finally:
            self.metric_bag_state = training

    @replaces
    def validate(self) -> dict[str, float]:
        """Evaluate the units; their score is the mean of those that have one."""
        run = self.current_run
        score = split_prefix(self.monitor)[1]
        metrics = Evaluation(self, run.stop_signals).metrics(run.valid_loader)
        scores = [value for name, value in metrics.items() if name.endswith(f"/{score}")]
        if scores and score not in metrics:
            metrics = {score: sum(scores) / len(scores), **metrics}
        return metrics

    def metric_on_epoch_end(self) -> Mapping[str, float]:
        """Add the metrics of the unit, computed over all ranks, where an epoch has its own."""
        numbers = super().metric_on_epoch_end()
        unit = self._valid_unit if self.mode == "test" else self.train_unit
        if self.mode == "train" and self._is_published:
            return numbers
        return {**numbers, **compute_over_ranks(unit, partial(gather_dp, self.engine))}

    @property
    def _is_published(self) -> bool:
        """Whether RegimeAddon records and resets the metrics of the training unit within epochs."""
        return isinstance(self, RegimeAddon) and self.publishes_metrics

    def publish_metrics(self) -> dict[str, float]:
        """Return what the metrics of the training unit have counted, and reset them; all ranks call it.

        Returns
        -------
        dict of str to float
            Numbers by name, computed over all ranks.
        """
        numbers = compute_over_ranks(self.train_unit, partial(gather_dp, self.engine))
        reset(self.train_unit)
        return numbers

    @property
    def metric_bag_state(self) -> dict[str, Any]:
        """What the metrics of the training unit have counted since they were reset."""
        return states_of(self.train_unit)

    @metric_bag_state.setter
    def metric_bag_state(self, states: Mapping[str, Any]) -> None:
        metrics = metrics_of(self.train_unit)
        check_names(states, metrics)
        for name, metric in metrics.items():
            metric.load_state_dict(states[name])


def check_unit(name: str, unit: Any) -> None:
    """Refuse what is not a unit, or one whose model cannot be replaced by what an engine puts around it."""
    model = getattr(unit, "model", None)
    is_unit = callable(unit) and not isinstance(unit, (type, nn.Module))
    if is_unit and not isinstance(model, nn.Module) and isinstance(getattr(model, "module", None), nn.Module):
        raise TaskError(
            f"{name}.model is {kind_of(model)} around a module; let the property model return the torch.nn.Module "
            "itself, self._model.module"
        )
    if not is_unit or not isinstance(model, nn.Module):
        raise TaskError(
            f"{name} is {kind_of(unit)}; give an object with __call__(batch) -> (loss, num_targets) and an attribute, "
            "or a property, model"
        )
    if not _places_of(unit, model):
        raise TaskError(
            f"no attribute of {type(unit).__name__} holds its model, so that it would call the model without "
            "DistributedDataParallel or another engine; write self._model = model in its __init__"
        )


def _places_of(owner: Any, model: nn.Module, depth: int = _DEPTH) -> list[tuple[Any, str]]:
    """Return the attributes that hold a model, of an object and of objects in it."""
    places = []
    for name, value in getattr(owner, "__dict__", {}).items():
        if value is model:
            places.append((owner, name))
        elif depth > 1 and not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
            places += _places_of(value, model, depth - 1)
    return places


def _by_name(units: Any) -> dict[str, Any]:
    units_by_name = dict(units) if isinstance(units, Mapping) else {"": units}
    for name, unit in units_by_name.items():
        check_unit(f"valid_units[{name!r}]" if name else "valid_units", unit)
    return units_by_name


def _set_step(unit: Any, step: int) -> None:
    set_step_nr: Callable[[int], None] | None = getattr(unit, "set_step_nr", None)
    if set_step_nr is not None:
        set_step_nr(step)
