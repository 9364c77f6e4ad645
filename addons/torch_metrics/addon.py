"""Metrics of torchmetrics: updated by what each step returns, computed once an epoch over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zae.addon import AddOnBase, Description
from zae.addons.torch_metrics.torchmetrics import (
    combine_ranks,
    load_states,
    merge_states,
    read_states,
    was_updated,
)
from zae.compose.introspect import owners_of
from zae.errors import CheckpointMismatch, ConfigError, StepError, did_you_mean
from zae.metrics.torchmetrics_values import is_metric, numbers_of
from zae.parts import gather_dp

__all__ = ["TorchMetricsAddon"]

_SPLITS = ("train", "valid")


class TorchMetricsAddon(AddOnBase):
    """Update metrics of torchmetrics with what the steps return, and record them with the other metrics of an epoch.

    A step returns the inputs of the metrics beside its loss: ``{"loss": loss, "output": logits, "targets": labels}``. A
    metric is computed once at the end of each epoch, or evaluation, over the samples of all ranks, and starts over with
    the next one. It is recorded under its name, is in every logger, and can be the ``monitor``, by which the best
    checkpoint is kept. A checkpoint within an epoch contains what each rank has counted in it: a resume continues
    exactly there. On another number of ranks, rank 0 continues from what all of them had counted, and the others begin
    at zero, so that each sample of the epoch counts once.

    Training is bitwise the same with and without metrics that draw no random numbers. The inputs are not kept: a metric
    holds what it needs. Values that a wrapper of torchmetrics keeps beside its states, those of a MetricTracker for
    instance, are not saved.

    Parameters
    ----------
    torch_metrics : Metric, MetricCollection, or dict of str to either
        The metrics by name; a single one is called like its class. A metric that computes a vector, or a dict, is
        recorded as ``<name>/<index>``, or ``<name>/<key>``, as are those of a collection in a dict. A metric replaces a
        number of the same name that the step returns.
    torch_metrics_inputs : sequence of str, or dict of str to sequence of str
        The entries of what a step returns that ``update`` is called with, in order. A dict has those of single metrics
        or collections by name; the others take ``("output", "targets")``.
    torch_metrics_splits : sequence of {"train", "valid"}
        Where the metrics are computed: over the batches of training, of evaluations, or of both.

    Raises
    ------
    ConfigError
        At construction, where something is not a metric, or a name is unknown.
    StepError
        Where a step does not return an input, or a metric computes no numbers; for a validation before the first step
        of training, with one batch.

    Examples
    --------
    >>> import torch
    >>> from torchmetrics.classification import MulticlassF1Score
    >>> from zae import Trainer
    >>> from zae.addons import TorchMetricsAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         inputs, targets = batch
    ...         output = self.model(inputs)
    ...         loss = torch.nn.functional.cross_entropy(output, targets)
    ...         return {"loss": loss, "output": output, "targets": targets}
    ...     test_step = train_step
    >>> model, targets = torch.nn.Linear(2, 3), torch.tensor([0, 1, 2, 2])
    >>> train, valid = [(torch.ones(4, 2), targets)], [(torch.zeros(4, 2), targets)]
    >>> trainer = Task.add_on(TorchMetricsAddon)(
    ...     model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), monitor="f1",
    ...     torch_metrics={"f1": MulticlassF1Score(num_classes=3)})
    >>> metrics = trainer.run(1, train, valid)
    >>> 0 <= metrics["best_valid"]["f1"] <= 1
    True
    """

    layer = "control"
    rank_state_attributes = ("torch_metric_states",)
    _torch_metrics: dict[str, dict[str, Any]]

    replicated_options = {
        "torch_metrics": "metric_on_epoch_end",
        "torch_metrics_splits": "metric_on_epoch_end",
    }

    def __init__(
        self,
        *args: Any,
        torch_metrics: Any,
        torch_metrics_inputs: Any = ("output", "targets"),
        torch_metrics_splits: Any = ("valid",),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        by_name = _by_name(torch_metrics)
        self.torch_metrics_inputs = _inputs_of(torch_metrics_inputs, by_name)
        splits = (torch_metrics_splits,) if isinstance(torch_metrics_splits, str) else tuple(torch_metrics_splits or ())
        unknown = [split for split in splits if split not in _SPLITS]
        if unknown or not splits:
            raise ConfigError(
                f"torch_metrics_splits={torch_metrics_splits!r}; write ('valid',), ('train',) or ('train', 'valid')"
            )
        self._torch_metrics = {split: {name: _prepared(metric) for name, metric in by_name.items()} for split in splits}
        if owners_of(type(self), "metric_on_epoch_end") == [TorchMetricsAddon]:
            self.log_test.keeps = False  # Nothing else reads outputs at the end of an evaluation.

    @property
    def torch_metrics(self) -> dict[str, dict[str, Any]]:
        """The metrics of this trainer, by split and name; they are copies of those that were given."""
        return self._torch_metrics

    @property
    def torch_metric_states(self) -> dict[str, Any]:
        """What the metrics of training have counted in the open epoch."""
        if not self.progress_checker.epoch_batch:
            return {}
        return {name: read_states(metric) for name, metric in self._torch_metrics.get("train", {}).items()}

    @torch_metric_states.setter
    def torch_metric_states(self, states: Mapping[str, Any]) -> None:
        group = self._torch_metrics.get("train", {})
        if states and states.keys() != group.keys():
            raise CheckpointMismatch(
                f"the state has the metrics {', '.join(states)} of training, and here they are "
                f"{', '.join(group) or 'none'}; build the trainer with the metrics that it was saved with"
            )
        for name, metric in group.items():
            if states:
                load_states(metric, states[name], name)
            else:
                metric.reset()

    def merge_ranks(self, entries: Sequence[Any], rank: int) -> Any:
        """Give rank 0 what all ranks have counted in the open epoch, and the others nothing."""
        key = "torch_metric_states"
        counted = [entry[key] for entry in entries if entry.get(key)]
        group = self._torch_metrics.get("train", {})
        if rank or len(counted) < 2 or any(states.keys() != group.keys() for states in counted):
            return {key: counted[0] if counted and not rank else {}}
        merged = {}
        for name, metric in group.items():
            merged[name] = merge_states(metric, [saved[name] for saved in counted])
        return {key: merged}

    def setup(self) -> None:
        """Move the metrics to the device."""
        super().setup()
        for group in self._torch_metrics.values():
            for metric in group.values():
                metric.to(self.device)

    @property
    def _split(self) -> str:
        return "train" if self.mode == "train" else "valid"

    @contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Reset the metrics of training, unless the epoch is continued."""
        if not self.progress_checker.epoch_batch:
            self._reset("train")
        with super().epoch_context():
            yield

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Reset the metrics of evaluations."""
        self._reset("valid")
        with super().evaluation_context():
            yield

    def logging(self, step_dict: Mapping[str, Any], weight: float = 1) -> None:
        """Update the metrics with what a step returned."""
        for name, metric in self._torch_metrics.get(self._split, {}).items():
            self._update_metric(name, metric, step_dict)
        super().logging(step_dict, weight)

    def _update_metric(self, name: str, metric: Any, step_dict: Mapping[str, Any]) -> None:
        inputs = [self._input(name, entry, step_dict) for entry in self.torch_metrics_inputs[name]]
        try:
            metric.update(*inputs)
        except Exception as error:
            shapes = ", ".join(
                f"{entry} {tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__}"
                for entry, tensor in zip(self.torch_metrics_inputs[name], inputs)
            )
            error.add_note(f"zae: the metric {name!r} ({type(metric).__name__}) was updated with {shapes}")
            raise

    def metric_on_epoch_end(self) -> Mapping[str, float]:
        """Add the metrics of this mode, computed over all ranks."""
        # By the history: an override may read what only the other mode has recorded.
        split = self._split
        super_metrics = super().metric_on_epoch_end
        numbers = dict(self.history.further_metrics("train" if split == "train" else "test", super_metrics))
        group = self._torch_metrics.get(split, {})
        if not any(gather_dp(self.engine, any(map(was_updated, group.values())))):
            return numbers
        for name, metric in group.items():
            if self.engine.dp_world_size > 1:
                combine_ranks(metric, partial(gather_dp, self.engine))
            numbers |= numbers_of(name, metric.compute())
        self._reset(split)
        return numbers

    def describe(self) -> list[Description]:
        """Tell which entries the steps have to return."""
        entries = dict.fromkeys(entry for inputs in self.torch_metrics_inputs.values() for entry in inputs)
        steps = " and ".join({"train": "train_step", "valid": "test_step"}[split] for split in self._torch_metrics)
        updated = f"updated with {', '.join(map(repr, entries))} of {steps}"
        return [
            *super().describe(),
            Description(", ".join(self.torch_metrics_inputs), updated, where="metric_on_epoch_end"),
        ]

    def _reset(self, split: str) -> None:
        for group in self._torch_metrics.get(split, {}).values():
            group.reset()

    def _input(self, name: str, entry: str, step_dict: Mapping[str, Any]) -> Any:
        """Return an entry of what a step returned, without its graph."""
        if entry in step_dict:
            value = step_dict[entry]
            return value.detach() if isinstance(value, Tensor) else value
        step = "train_step" if self.mode == "train" else "test_step"
        hint = did_you_mean(entry, map(str, step_dict))
        raise StepError(
            f"{type(self).__name__}.{step} returned no {entry!r}, which the metric {name!r} is updated with{hint}; its "
            f"entries are {', '.join(map(str, step_dict))}. Return it, for instance {{'loss': loss, 'output': logits, "
            f"'targets': labels}}, or write torch_metrics_inputs={{{name!r}: (...)}}"
        )


def _by_name(given: Any) -> dict[str, Any]:
    """Return the metrics that were given by name."""
    if is_metric(given):
        return {type(given).__name__: given}
    metrics: dict[str, Any] = {}
    if isinstance(given, (Mapping, nn.ModuleDict)):
        for name, metric in given.items():  # Of a MetricCollection, with its prefix.
            inner = {"": metric} if is_metric(metric) else _by_name(metric)
            metrics |= {"/".join(filter(None, (str(name), part))): metric for part, metric in inner.items()}
    if metrics:
        return metrics
    raise ConfigError(
        f"torch_metrics contains {given!r:.60}, which is not a metric of torchmetrics; write "
        "torch_metrics={'f1': torchmetrics.classification.MulticlassF1Score(num_classes=10)}"
    )


def _inputs_of(given: Any, metrics: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the inputs of each metric."""
    default: Any = ("output", "targets")
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(metrics, given)
    groups = {name: name.rpartition("/")[0] for name in metrics}  # Of the metrics of a collection in a dict.
    if unknown := [name for name in by_name if name not in {*metrics, *groups.values()}]:
        raise ConfigError(
            f"torch_metrics_inputs has {unknown[0]!r}{did_you_mean(str(unknown[0]), metrics)}; the metrics are "
            f"{', '.join(metrics)}"
        )
    inputs = {name: by_name.get(name, by_name.get(groups[name], default)) for name in metrics}
    inputs = {name: (names,) if isinstance(names, str) else names for name, names in inputs.items()}
    for name, names in inputs.items():
        if not isinstance(names, (tuple, list)) or not names or not all(isinstance(entry, str) for entry in names):
            raise ConfigError(
                f"torch_metrics_inputs of {name!r} is {names!r:.60}; give names of what the steps return, for instance "
                "('output', 'targets')"
            )
    return {name: tuple(names) for name, names in inputs.items()}


def _never() -> bool:
    return False


def _prepared(metric: Any) -> Any:
    """Return a copy of a metric that is reset, and does not itself ask other ranks."""
    with torch.no_grad():
        metric_copy = metric.clone()
    for module in metric_copy.modules():
        if is_metric(module):
            module.distributed_available_fn = _never
    metric_copy.reset()
    return metric_copy
