"""The log of an epoch: what each step returned, its weighted means, and what is kept of outputs."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zae.errors import MonitorError, StepError, did_you_mean, printable
from zae.loop.step_output import NotNumber, not_number
from zae.metrics.reductions import KIND_OF, Partial, is_typed, means_of

__all__ = ["EpochLog", "in_turn", "merge_logs", "plain", "to_host"]

_log = logging.getLogger("zae")
_CHUNK = 64  # Values that wait on an accelerator before they are packed into one tensor.
_HINTS = {
    "log_train": "write keep_train_outputs=True, an option of the trainer, to keep it for metric_on_epoch_end",
    "log_test": "override metric_on_epoch_end, which it is kept for, or call inference(loader)",
}


class _PendingDeviceValues:
    """Numbers that wait on an accelerator: reading one at once would make the host wait for the device."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._chunks: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        # A buffer that the step continues to use, or the static output of a CUDA graph, has changed until it is read.
        self._waiting.append(value.detach().clone())
        if len(self._waiting) == _CHUNK:
            self._chunks.append(torch.stack(self._waiting))
            self._waiting = []

    def read(self) -> list[float]:
        """Copy them to the host, at once if they are of one type: not all devices have float64."""
        parts = self._chunks
        if self._waiting:
            parts.append(torch.stack(self._waiting))
        self._waiting = []
        self._chunks = []
        if len({part.dtype for part in parts}) == 1:
            parts = [torch.cat(parts)]
        numbers = []
        for part in parts:
            numbers += part.tolist()
        return numbers


class _Series:
    """The values of one scalar in one epoch, and what they come to in float64, whenever they are read."""

    def __init__(self, kind: str = "mean") -> None:
        self.values = array("d")
        self.weights = array("d")
        self.kind = kind
        self.is_mean = kind == "mean"
        self.sums = Partial.empty(kind)
        self.waits = False  # Whether any value waits on its device.
        self.pending = _PendingDeviceValues()
        self.pending_weights = _PendingDeviceValues()
        self.owed: list[int] = []  # The indices of the weights that wait as well.

    def add(self, value: float, weight: float | Tensor) -> None:
        if self.waits:  # The values before this one come first.
            self.read()
        self.values.append(value)
        self.weights.append(float(weight))

    def wait(self, value: Tensor, weight: float | Tensor) -> None:
        """Keep a value on its device, and its weight too where that is there."""
        self.waits = True
        self.pending.add(value)
        if isinstance(weight, Tensor):
            self.owed.append(len(self.weights))
            self.pending_weights.add(weight)
            weight = math.nan
        self.weights.append(weight)

    def read(self) -> None:
        """Copy the waiting values to the host, and add up what is new, always in the same order."""
        if self.waits:
            self.values.extend(self.pending.read())
            for index, weight in zip(self.owed, self.pending_weights.read(), strict=True):
                self.weights[index] = weight
            self.waits = False
            self.owed = []
        first_new = self.sums.seen
        self.sums = self.sums.extend(self.values[first_new:], self.weights[first_new:])


class EpochLog(Mapping[str, list[Any]]):
    """What the steps of one epoch returned: each entry is the list of its values, one for each batch.

    Scalars are kept as floats, and their mean is by sample: ``trainer.log_train["loss"]``. The typed ones of
    `zae.metrics` are combined as their type says. Anything else, an output of
    the model for instance, is kept where something is to read it, tensors detached and on the host, until the epoch or
    the evaluation ends: in ``log_test`` for an override of ``metric_on_epoch_end``, in ``log_train`` with
    ``keep_train_outputs=True``.

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
    >>> log = EpochLog()
    >>> log.record({"loss": torch.tensor(1.0), "output": torch.zeros(4, 2)}, weight=4)
    >>> log.record({"loss": torch.tensor(4.0), "output": torch.zeros(1, 2)}, weight=1)
    >>> log["loss"], log.means(), [tuple(o.shape) for o in log["output"]]
    ([1.0, 4.0], {'loss': 1.6}, [(4, 2), (1, 2)])
    """

    def __init__(self, name: str = "log", keeps: bool = True) -> None:
        self._name = name
        self.keeps = keeps
        self._series: dict[str, _Series] = {}
        self._outputs: dict[str, list[Any]] = {}
        self._dropped: dict[str, bool] = {}  # Entries that are not kept, and whether their values are tensors.
        self.not_numbers: dict[str, NotNumber] = {}
        # For the means since the last record: how many values it has seen, and the sums of those of an earlier epoch.
        self._counts_recorded: dict[str, int] = {}
        self._carried: dict[str, Partial] = {}

    def record(self, step_dict: Mapping[str, Any], weight: Any = 1) -> None:
        """Record what one step returned; its numbers are means over ``weight`` samples (or targets)."""
        # Of a dict this takes less time than `items`; another mapping may iterate over something else.
        for key in step_dict if type(step_dict) is dict else step_dict.keys():
            value = step_dict[key]
            series = self._series.get(key)
            kind = type(value)
            # A number on the host of an entry that is there already comes with every step: no detours.
            is_number = kind is float or (kind is Tensor and value.is_cpu and not value.ndim)
            if is_number and series and not series.waits and series.is_mean:
                series.values.append(value if kind is float else value.item())
                series.weights.append(weight)
            elif key != "num_targets":
                self._record_other(str(key), value, weight)

    def _record_other(self, key: str, value: Any, weight: Any) -> None:
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
        series = self._series.setdefault(key, _Series(kind))
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
            series.wait(value, weight)

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
        for part in (
            self._series,
            self._outputs,
            self._dropped,
            self._counts_recorded,
            self._carried,
            self.not_numbers,
        ):
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
        self._counts_recorded.clear()
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
        carried = self._since()
        self.clear()
        self._carried = carried

    def take_sums(self) -> dict[str, Partial]:
        """Return the sums since the last call, and reset them."""
        sums = self._since()
        self._counts_recorded = {key: len(series.values) for key, series in self._series.items()}
        self._carried = {}
        return sums

    def _since(self) -> dict[str, Partial]:
        """Return the sums of what ``take_sums`` has not returned yet, where there is anything."""
        sums = dict(self._carried)
        for key, series in self._series.items():
            series.read()
            before = sums.get(key)
            if before is None or before.kind != series.kind:
                before = Partial.empty(series.kind)
            first_new = self._counts_recorded.get(key, 0)
            sums[key] = before.extend(series.values[first_new:], series.weights[first_new:])
        return {key: partial for key, partial in sums.items() if partial.has_value}

    def sums(self) -> dict[str, Partial]:
        """Return what the values of each scalar come to so far."""
        for series in self._series.values():
            series.read()
        return {key: series.sums for key, series in self._series.items()}

    def means(self) -> dict[str, float]:
        """Return each scalar of the epoch: its mean by sample, or what its type says."""
        return means_of(self.sums())

    @property
    def kinds(self) -> dict[str, str]:
        """How each scalar that is not averaged is combined: "sum", "max", "min" or "last"."""
        return {key: series.kind for key, series in self._series.items() if not series.is_mean}

    def over_ranks(self, gather: Callable[[Any], list[Any]], world_size: int) -> EpochLog:
        """Return the log as one process would have it; on one rank it is this log itself."""
        if world_size == 1:
            return self
        self.sums()  # Reads what waits on a device, before the log is sent.
        return merge_logs(gather(self))

    def state_dict(self, is_open: bool = True) -> dict[str, Any]:
        """Return what was recorded; of a closed epoch, only what no record has seen yet."""
        if not is_open:
            carried = {key: partial.as_saved() for key, partial in self._since().items()}
            return {"series": {}, "kept": {}, "seen": {}, "carried": carried}
        series = {}
        for key, entry in self._series.items():
            entry.read()
            series[key] = [_float64(entry.values), _float64(entry.weights)]
        state: dict[str, Any] = {
            "series": series,
            "kept": self._kept_to_save(),
            "seen": dict(self._counts_recorded),
            "carried": {key: partial.as_saved() for key, partial in self._carried.items()},
        }
        if self._dropped:
            state["dropped"] = dict(self._dropped)
        if self.kinds:
            state["kinds"] = self.kinds
        return state

    def _kept_to_save(self) -> dict[str, list[Any]]:
        """Return the kept values that a checkpoint can hold, and warn of values that it cannot."""
        outputs = {}
        lost = []
        for key, values in self._outputs.items():
            if all(map(_can_be_saved, values)):
                outputs[key] = list(values)
            else:
                lost.append(key)
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
        for key, (values, weights) in state["series"].items():
            series = _Series(kinds.get(key, "mean"))
            for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
                series.add(value, weight)
            self._series[key] = series
        for key, was_tensor in state.get("dropped", {}).items():
            self._dropped[key] = bool(was_tensor)
        for key, values in state["kept"].items():
            if values:
                self._outputs[key] = list(values)
        if not self.keeps:
            self.free()
        for key, count in state["seen"].items():
            self._counts_recorded[key] = int(count)
        for key, saved in state["carried"].items():
            self._carried[key] = _as_partial(*saved)


def _float64(values: array[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _as_partial(total: Any, weight: Any, count: Any = 0, kind: Any = "mean") -> Partial:
    """Return the sums of a state, or raise KeyError, TypeError or ValueError where they cannot be such."""
    return Partial(float(total), float(weight), int(count), Partial.empty(kind).kind)


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


def _can_be_saved(value: Any) -> bool:
    """Return whether a checkpoint can hold a value."""
    if isinstance(value, Mapping):
        return all(map(_can_be_saved, value.values()))
    if type(value) in (list, tuple):
        return all(map(_can_be_saved, value))
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufcSU"
    return value is None or isinstance(value, (Tensor, str, bytes, bool, int, float, complex))


def to_host(value: Any) -> Any:
    """Detach a tensor, or the tensors in a container or an object, and bring them to the host; copy an array."""
    if isinstance(value, Tensor):
        # A view of what the step continues to use would change later.
        return value.detach().clone() if value.is_cpu else value.detach().cpu()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_host(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(to_host(item) for item in value)
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, to_host(getattr(value, field.name)))
        return twin
    return _free(value, {}) if hasattr(value, "__dict__") else value


def _free(value: Any, twins: dict[int, Any]) -> Any:
    """Return an object of any class without a graph or memory of a device: itself, or a copy where it holds some.

    A distribution is such an object, and the cache of keys and values that a language model returns. ``twins`` has the
    copies by the ids of what they are of, so that objects which refer to each other are copied once.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu() if value.requires_grad or not value.is_cpu else value
    kind = type(value)
    if kind in (list, tuple):
        items = [_free(item, twins) for item in value]
        is_same = all(map(operator.is_, items, value))
        return value if is_same else kind(items)
    members = value if kind is dict else getattr(value, "__dict__", None)
    # Modules stay alive in any case.
    if not members or type(members) is not dict or isinstance(value, (nn.Module, ModuleType)):
        return value
    if id(value) not in twins:
        try:
            twin = copy.copy(value)
            twins[id(value)] = twin  # Before its attributes are looked at, which may refer back to it.
            inner = {key: _free(item, twins) for key, item in members.items()}
            if all(inner[key] is item for key, item in members.items()):
                return value
            attributes = twin if kind is dict else vars(twin)
            attributes.update(inner)
        except Exception:  # Of the user's classes: what cannot be copied is kept as it is.
            return value
    return twins[id(value)]


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
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
        for value, weight in in_turn(pairs):
            merged._add(key, value, weight, kind)
    for key in _keys_of([part._outputs for part in parts]):
        merged._outputs[key] = in_turn([part._outputs.get(key, []) for part in parts])
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


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """List the first of each part, then the second of each, and so on; parts may end early."""
    if len(parts) == 1:
        return parts[0]
    entries = []
    for index in range(max(map(len, parts), default=0)):
        entries += [part[index] for part in parts if index < len(part)]
    return entries
