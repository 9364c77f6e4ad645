"""The log of an epoch: what each step returned, its weighted means, and what is kept of outputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from zae.errors import CheckpointError, MonitorError, StepError, did_you_mean, printable
from zae.loop.series import Series
from zae.loop.step_remarks import NotNumber, not_number
from zae.metrics.reductions import KIND_OF, Partial, is_typed, means_of
from zae.values.host import to_host

__all__ = ["EpochLog", "interleave", "merge_logs", "plain_numbers"]

_log = logging.getLogger("zae")
_HINTS = {
    "log_train": "write keep_train_outputs=True, an option of the trainer, to keep it for metric_on_epoch_end",
    "log_test": "override metric_on_epoch_end, which it is kept for, or call inference(loader)",
}


class EpochLog(Mapping[str, list[Any]]):
    """What the steps of one epoch returned: each entry is the list of its values, one for each batch.

    Scalars are kept as floats, and their mean is by sample: ``trainer.log_train["loss"]``. The typed ones of
    `zae.metrics` are combined as their type says. Anything else, an output of the model for instance, is kept where
    something is to read it, tensors detached and on the host, until the epoch or the evaluation ends: in ``log_test``
    for an override of ``metric_on_epoch_end``, in ``log_train`` with ``keep_train_outputs=True``.

    Parameters
    ----------
    name : str
        Its name in errors.
    keeps : bool
        Whether it keeps what is not a number.

    Attributes
    ----------
    not_numbers : dict of str to NotNumber
        The entries that were not numbers when they were recorded first.

    Examples
    --------
    >>> import torch
    >>> log = EpochLog()
    >>> log.record({"loss": torch.tensor(1.0), "output": torch.zeros(4, 2)}, weight=4)
    >>> log.record({"loss": torch.tensor(4.0), "output": torch.zeros(1, 2)}, weight=1)
    >>> log["loss"], log.means(), [tuple(o.shape) for o in log["output"]]
    ([1.0, 4.0], {'loss': 1.6}, [(4, 2), (1, 2)])
    """

    def __init__(self, name: str = "log", keeps: bool = True) -> None:
        self._name = name
        self.keeps = keeps
        self._series: dict[str, Series] = {}
        self._outputs: dict[str, list[Any]] = {}
        self._dropped: dict[str, bool] = {}  # Entries that are not kept, and whether their values are tensors.
        self.not_numbers: dict[str, NotNumber] = {}
        self._carried: dict[str, Partial] = {}  # The sums of an earlier epoch that no record has seen yet.

    def record(self, step_dict: Mapping[str, Any], weight: Any = 1) -> None:
        """Record what one step returned; its numbers are means over ``weight`` samples (or targets)."""
        # Of a dict this takes less time than `items`; another mapping may iterate over something else.
        for key in step_dict if type(step_dict) is dict else step_dict.keys():
            value = step_dict[key]
            series = self._series.get(key)
            kind = type(value)
            # A number on the host of an entry that is there already comes with every step: no detours.
            is_number = kind is float or (kind is Tensor and value.is_cpu and not value.ndim)
            if is_number and series and not series.has_pending and series.is_mean:
                series.values.append(value if kind is float else value.item())
                series.weights.append(weight)
            elif key != "num_targets":
                self._record_by_type(str(key), value, weight)

    def _record_by_type(self, key: str, value: Any, weight: Any) -> None:
        """Record a value that is not a number on the host of an entry that exists already."""
        if is_typed(value):
            self._record_typed(key, value, weight)
        elif isinstance(value, Tensor) and (key in self._outputs or key in self._dropped) and self._holds_tensors(key):
            self._keep(key, value)  # Squeezed, a batch of one sample has no dimension any more.
        elif isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            self._add(key, value, weight)
        elif isinstance(value, (bool, int, float, np.integer, np.floating, np.bool_)) or _is_scalar_array(value):
            self._add(key, float(value), weight)
        elif isinstance(value, Mapping):
            self.record({f"{key}/{inner}": item for inner, item in value.items()}, weight)
        elif key == "loss" and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            self.record({key: value.reshape(())}, weight)  # Of shape [1]: backward takes it, and so do we.
        else:
            self._keep(key, value)

    def _add(self, key: str, value: float | Tensor, weight: Any, kind: str = "mean") -> None:
        """Add a number to its series; refuse a number that is to be combined in another way than the series."""
        series = self._series.setdefault(key, Series(kind))
        if series.kind != kind:
            raise StepError(
                f"the step returned {key!r} to be combined by {kind}, and before by {series.kind}; return it as the "
                f"same type for each batch (zae.metrics)"
            )
        if not isinstance(value, Tensor):
            series.add(value, weight)
        elif value.is_cpu:
            series.add(value.item(), weight)
        else:
            series.add_pending(value, weight)

    def _record_typed(self, key: str, metric: Any, weight: Any) -> None:
        """Record a typed metric; a mean may have its own weight."""
        own_weight = getattr(metric, "weight", None)
        value = _one_number(key, metric, metric.value)
        weight = _one_number(key, metric, weight if own_weight is None else own_weight)
        if isinstance(weight, Tensor) and weight.is_cpu:
            weight = weight.item()
        # A weight on an accelerator is not looked at: that would wait for the device.
        if own_weight is not None and not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
            raise StepError(
                f"the step returned {key!r} as a Mean of weight {weight!r}; give the number of items that it is the "
                "mean of, for instance Mean(value, weight=mask.sum())"
            )
        self._add(key, value, weight, KIND_OF[type(metric)])

    def _holds_tensors(self, key: str) -> bool:
        """Return whether the last value of an entry that is not a number is, or was, a tensor."""
        return self._dropped[key] if key in self._dropped else isinstance(self._outputs[key][-1], Tensor)

    def _keep(self, key: str, value: Any) -> None:
        """Keep a value, or only note that there was one."""
        if key not in self.not_numbers:
            self.not_numbers[key] = not_number(key, value)
        if self.keeps and key not in self._dropped:
            self._outputs.setdefault(key, []).append(to_host(value))
        else:
            self._dropped[key] = isinstance(value, Tensor)

    def __getitem__(self, key: str) -> list[Any]:
        if key in self._series:
            self._series[key].read()
            return self._series[key].values.tolist()
        if key in self._outputs:
            return self._outputs[key]
        if key in self._dropped:
            raise self._not_kept(key)
        if len(self):
            available = f"{', '.join(self)}; use one of these, or return it from the step"
        else:
            available = "nothing yet: no step of this epoch has run in that mode"
        error = MonitorError(f"{self._name} has no entry {key!r}{did_you_mean(str(key), self)}; available: {available}")
        error.log = self  # type: ignore[attr-defined]  # Whose entry was asked for: `History.further_metrics` reads it.
        raise error

    def __setitem__(self, key: str, values: Iterable[Any]) -> None:
        """Replace the values of an entry; of numbers, each has the weight 1 in the mean."""
        values = list(values)
        for part in (self._series, self._outputs, self._dropped, self._carried, self.not_numbers):
            part.pop(key, None)
        for value in values:
            self.record({key: value})

    def _not_kept(self, key: str) -> MonitorError:
        """Return the error for an entry that steps have returned and that cannot be read."""
        if self.keeps:
            text = (
                f"{self._name} no longer holds {key!r}: what is not a number is freed when its epoch, or its "
                "evaluation, ends; read it in metric_on_epoch_end, or call inference(loader)"
            )
        else:
            text = f"{self._name} does not keep {key!r}, which is not a number; {_HINTS.get(self._name, 'keep it')}"
        error = MonitorError(text)
        error.is_lost = self.keeps  # type: ignore[attr-defined]  # Whether it was there, or will be in the next epoch.
        return error

    def __iter__(self) -> Iterator[str]:
        yield from self._series
        yield from self._outputs

    def __len__(self) -> int:
        return len(self._series) + len(self._outputs)

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(self)})"

    def clear(self) -> None:
        """Remove all entries."""
        self._series.clear()
        self._outputs.clear()
        self._dropped.clear()
        self._carried.clear()

    def free(self) -> None:
        """Free what is not a number; the numbers stay until the next epoch, or evaluation, begins."""
        self._dropped |= {key: self._holds_tensors(key) for key in self._outputs}
        self._outputs.clear()

    def empty_copy(self) -> EpochLog:
        """Return an empty log of the same name, which keeps the same."""
        return EpochLog(self._name, self.keeps)

    def begin_epoch(self) -> None:
        """Remove the entries of the last epoch, except the sums of what no record has seen yet."""
        carried = self._untaken_sums()
        self.clear()
        self._carried = carried

    def take_sums(self) -> dict[str, Partial]:
        """Return the sums since the last call, and reset them."""
        sums = self._untaken_sums()
        for series in self._series.values():
            series.taken_count = len(series.values)
        self._carried = {}
        return sums

    def _untaken_sums(self) -> dict[str, Partial]:
        """Return the sums of what ``take_sums`` has not returned yet, where there is anything."""
        sums = dict(self._carried)
        for key, series in self._series.items():
            series.read()
            before = sums.get(key)
            if before is None or before.kind != series.kind:
                before = Partial.empty(series.kind)
            sums[key] = before.extend(series.values[series.taken_count :], series.weights[series.taken_count :])
        return {key: partial for key, partial in sums.items() if partial.has_value}

    def read(self) -> None:
        """Copy the values that wait on a device to the host."""
        for series in self._series.values():
            series.read()

    def sums(self) -> dict[str, Partial]:
        """Return what the values of each scalar come to so far."""
        self.read()
        return {key: series.sums for key, series in self._series.items()}

    def means(self) -> dict[str, float]:
        """Return each scalar of the epoch: its mean by sample, or what its type says."""
        return means_of(self.sums())

    @property
    def kinds(self) -> dict[str, str]:
        """How each scalar that is not averaged is combined: "sum", "max", "min" or "last"."""
        return {key: series.kind for key, series in self._series.items() if not series.is_mean}

    def state_dict(self, is_open: bool = True) -> dict[str, Any]:
        """Return what was recorded; of a closed epoch, only what no record has seen yet."""
        if not is_open:
            carried = {key: partial.as_saved() for key, partial in self._untaken_sums().items()}
            return {"series": {}, "kept": {}, "seen": {}, "carried": carried}
        state: dict[str, Any] = {
            "series": {key: series.as_saved() for key, series in self._series.items()},
            "kept": self._outputs_to_save(),
            "seen": {key: series.taken_count for key, series in self._series.items() if series.taken_count},
            "carried": {key: partial.as_saved() for key, partial in self._carried.items()},
        }
        if self._dropped:
            state["dropped"] = dict(self._dropped)
        if self.kinds:
            state["kinds"] = self.kinds
        return state

    def _outputs_to_save(self) -> dict[str, list[Any]]:
        """Return the kept values that a checkpoint can hold, and warn of values that it cannot."""
        from zae.checkpoint.encoding import encode

        outputs = {}
        lost = []
        for key, values in self._outputs.items():
            try:
                encode(values)
            except CheckpointError:
                lost.append(key)
            else:
                outputs[key] = list(values)
        if lost:
            _log.warning(
                "what %s holds as %s cannot be saved; a resume in this epoch is without it",
                self._name,
                printable(", ".join(lost)),
            )
        return outputs

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.clear()
        kinds = state.get("kinds", {})
        for key, saved in state["series"].items():
            self._series[key] = Series.from_saved(kinds.get(key, "mean"), *saved)
        for key, was_tensor in state.get("dropped", {}).items():
            self._dropped[key] = bool(was_tensor)
        for key, values in state["kept"].items():
            if values:
                self._outputs[key] = list(values)
        if not self.keeps:
            self.free()
        for key, count in state["seen"].items():
            self._series[key].taken_count = int(count)
        for key, saved in state["carried"].items():
            self._carried[key] = Partial.from_saved(*saved)


def _one_number(key: str, metric: Any, value: Any) -> Any:
    """Return a value of a typed metric as a float, or as a tensor without dimensions; refuse another one."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(())
    if isinstance(value, (bool, int, float, np.integer, np.floating, np.bool_)) or _is_scalar_array(value):
        return float(value)
    described = f"of shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else f"{value!r:.40}"
    name = type(metric).__name__
    raise StepError(
        f"the step returned {key!r} as {name} of a {type(value).__name__} {described}; give it one number, for "
        f"instance {name}(x.sum())"
    )


def _is_scalar_array(value: Any) -> bool:
    """Return whether a value is an array without dimensions of a real number: what ``np.asarray(mean)`` returns."""
    return isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "biuf"


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain numbers: a record that is kept holds neither a graph nor memory of a device."""
    if not isinstance(metrics, Mapping):
        raise StepError(
            f"self.log({metrics!r:.40}, ...) takes a dict of metrics and a step; to record a number of a batch, return "
            f"it from the step: return {{'loss': loss, {str(metrics)[:40]!r}: value}}"
        )
    numbers = {}
    for key, metric in metrics.items():
        value = metric.value if is_typed(metric) else metric
        is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
        numbers[key] = value.item() if is_number else to_host(value)
    return numbers


def merge_logs(parts: list[EpochLog]) -> EpochLog:
    """Merge the logs of all ranks, batch by batch in turn, as an evaluation shares its batches."""
    if len(parts) == 1:
        return parts[0]
    merged = parts[0].empty_copy()
    for key in _keys_of([part._series for part in parts]):
        all_series = [part._series.get(key) for part in parts]
        kind = next(series.kind for series in all_series if series is not None)
        pairs = [[] if series is None else list(zip(series.values, series.weights)) for series in all_series]
        for value, weight in interleave(pairs):
            merged._add(key, value, weight, kind)
    for key in _keys_of([part._outputs for part in parts]):
        merged._outputs[key] = interleave([part._outputs.get(key, []) for part in parts])
    for part in parts:
        merged._dropped.update(part._dropped)
        merged.not_numbers |= part.not_numbers
    return merged


def _keys_of(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """List the keys of several mappings, each once, in the order in which they come first."""
    keys: dict[str, None] = {}
    for part in parts:
        keys |= dict.fromkeys(part)
    return list(keys)


def interleave(parts: list[list[Any]]) -> list[Any]:
    """List the first of each part, then the second of each, and so on; parts may end early."""
    if len(parts) == 1:
        return parts[0]
    entries = []
    for index in range(max(map(len, parts), default=0)):
        entries += [part[index] for part in parts if index < len(part)]
    return entries
