"""Read what ``train_step`` and ``test_step`` return: the only place that looks for the loss and the targets.

What cannot be used raises a StepError that names the remedy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from zae.compose.introspect import hook
from zae.errors import StepError
from zae.metrics.reductions import is_typed
from zae.torch_private import is_view
from zae.values.describe import describe_batch, describe_value
from zae.values.walk import leading_dimension

if TYPE_CHECKING:
    pass

__all__ = [
    "StepOutput",
    "check_metrics",
    "copy_output",
    "count_targets",
    "explain_failure",
    "loss_numbers",
    "read_output",
    "sample_weight",
]


class StepOutput(tuple[Mapping[str, Any], Any]):
    """What a step returned for one batch, and its weight in the means of the epoch: a pair of both.

    Examples
    --------
    >>> output = StepOutput(({"loss": 0.5, "num_targets": 3}, 3.0))
    >>> values, weight = output
    >>> values["loss"] == output.loss, weight, output.num_targets
    (True, 3.0, 3)
    """

    __slots__ = ()

    @property
    def values(self) -> Mapping[str, Any]:
        """What the step returned; a loss alone is ``{"loss": loss}``."""
        return self[0]

    @property
    def weight(self) -> Any:
        """The number of targets, else of samples: what the values weigh in the means of the epoch."""
        return self[1]

    @property
    def loss(self) -> Any:
        """The loss: a scalar, or a dict with one for each optimizer."""
        return self[0]["loss"]

    @property
    def num_targets(self) -> Any:
        """The number of targets that the loss is the mean over; None where the step did not count them."""
        return self[0].get("num_targets")


def loss_numbers(loss: Any) -> Any:
    """Return a loss as a float; one for each optimizer as a dict by their names."""
    if isinstance(loss, Mapping):
        return {str(key): loss_numbers(scalar) for key, scalar in loss.items()}
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def read_output(
    out: Any,
    batch: Any,
    sample_weight: Callable[[Any, Any], Any],
    owner: type,
    mode: str,
    count_targets: Callable[[Any, Any], Any] | None = None,
) -> tuple[Mapping[str, Any], Any]:
    """Return what the step of a class for this mode returned as a pair of values and weight, or raise StepError."""
    if type(out) is not dict and not isinstance(out, Mapping):  # Most steps return a dict, which is quick to see.
        is_number = isinstance(out, (int, float, np.number)) and mode != "train"
        if mode == "predict" and isinstance(out, (Tensor, np.ndarray)) and out.ndim:
            return {"output": out}, 1.0
        if not is_number and not (isinstance(out, Tensor) and out.numel() == 1):
            value = "None" if out is None else f"{type(out).__name__} {describe_value(out)}"
            entry = "'output': output" if mode == "predict" else "'loss': loss"
            raise StepError(f"{_name_of(owner, mode, batch)} returned {value}; return a dict: return {{{entry}}}")
        out = {"loss": out}
    loss = out.get("loss") if mode == "test" else None
    if isinstance(loss, (Tensor, np.ndarray)) and loss.ndim and math.prod(loss.shape) != 1:
        raise StepError(
            f"{_name_of(owner, mode, batch)} returned a loss of shape {tuple(loss.shape)}; reduce it to a scalar: "
            "loss.mean(), or return the losses of the samples under another name"
        )
    num_targets = out.get("num_targets")
    weight = sample_weight(batch, num_targets)
    if count_targets is not None:
        counted = count_targets(out, batch)
        if counted is not num_targets:
            out = {**out, "num_targets": counted}  # Not into the dict itself, which is the user's.
    return out, weight


def copy_output(
    output: tuple[Mapping[str, Any], Any], in_window: bool = False, with_outputs: bool = False
) -> tuple[Mapping[str, Any], Any]:
    """Return the output of a step with copies of its numbers that are other ones when they are read.

    The optimizer steps a parameter, and the next batch fills a buffer or an array: what is one, or shares the memory of
    one, is copied. In a window that is read after its last batch, so are all numbers on an accelerator, whose CUDA
    graphs write to the same memory, and the dict, which a step may return each time.
    """
    values, weight = output
    copies = {}
    for key in values:
        value = values[key]
        copy = _copy(value, in_window, with_outputs)
        if copy is not value:
            copies[key] = copy
    if copies or in_window:
        return {**values, **copies}, _copy(weight, in_window, with_outputs)
    return output


def _copy(value: Any, in_window: bool, with_outputs: bool) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1 and not with_outputs:
            return value
        may_change = value.is_leaf or is_view(value) or (in_window and not value.is_cpu)
        return value.detach().clone() if may_change else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.size == 1 or with_outputs else value
    if isinstance(value, Mapping):
        return {key: _copy(entry, in_window, with_outputs) for key, entry in value.items()}
    if is_typed(value):
        return type(value)(*(_copy(entry, in_window, with_outputs) for entry in value))
    return value


@hook
def count_targets(self: Any, values: Mapping[str, Any], batch: Any) -> Any:
    """Return the number of targets by which a micro-batch weighs in its step; with None all weigh the same.

    Parameters
    ----------
    values : mapping
        What ``train_step`` returned.
    batch : object
        The batch, on the trainer's device.

    Returns
    -------
    int, float, Tensor or None
        What ``scale_loss`` and ``normalize`` are given.
    """
    return values.get("num_targets")


@hook
def sample_weight(self: Any, batch: Any, num_targets: Any) -> float:
    """Return the weight of a batch in the means of the epoch: ``num_targets``, else the batch size, else 1.

    A ``num_targets`` on an accelerator stays there as a tensor, which is read with the log.

    Parameters
    ----------
    batch : object
        The batch, on the trainer's device.
    num_targets : int, float, Tensor or None
        What the step returned under this name.

    Returns
    -------
    float or Tensor
        The means of the epoch are divided by the sum of the weights.
    """
    if num_targets is None:
        return leading_dimension(batch) or 1
    if isinstance(num_targets, Tensor) and not num_targets.is_cpu and num_targets.numel() == 1:
        return num_targets.reshape(())  # type: ignore[return-value]
    return float(_check_targets(f"{type(self).__name__}.{self.mode}_step", num_targets))


def _name_of(owner: type, mode: str, batch: Any) -> str:
    return f"{owner.__name__}.{mode}_step (batch: {describe_batch(batch)})"


def explain_failure(error: Exception, out: Any, batch: Any, owner: type, optimizers: Iterable[str]) -> None:
    """Raise StepError if what ``train_step`` returned caused the error; otherwise add a note where more is known."""
    if isinstance(out, Tensor) and out.numel() == 1:
        out = {"loss": out}
    if not isinstance(out, Mapping):
        return  # `read_output` has refused it.
    try:
        _check_output(out, _name_of(owner, "train", batch), list(optimizers))
    except StepError as refused:
        raise refused from None
    if "backward through the graph a second time" in str(error):
        error.add_note(
            f"zae: the loss of {owner.__name__}.train_step depends on a tensor whose graph is freed: one that was kept "
            "from a batch before, in self for instance, is to be kept with .detach(). Where train_step itself calls "
            "backward(), take it out: it is done for you"
        )


def _check_output(out: Mapping[str, Any], place: str, keys: list[str]) -> None:
    """Refuse a mapping whose loss cannot be differentiated, or whose number of targets is not one."""
    if "loss" not in out:
        keys_in_words = ", ".join(map(repr, out)) or "none"
        near = difflib.get_close_matches("loss", list(map(str, out)), n=1)
        remedy = f"rename {near[0]!r} to 'loss'" if near else "return {'loss': loss, ...}"
        raise StepError(f"{place} returned a dict without 'loss'; its keys are {keys_in_words}; {remedy}")
    loss = out["loss"]
    if isinstance(loss, Mapping):
        if not keys or set(map(str, loss)) != set(keys):
            raise StepError(
                f"{place} returned losses for {list(loss)}, but the optimizers are {keys or ['0']}; "
                "return one scalar loss, or a dict with one loss for each optimizer"
            )
        for key, scalar in loss.items():
            _check_loss(f"{place}, loss[{key!r}]", scalar)
    else:
        _check_loss(place, loss)
    _check_targets(place, out.get("num_targets"))


def _check_targets(place: str, count: Any) -> Any:
    """Return a number of targets, read from its tensor, or refuse what cannot be one."""
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    good = isinstance(count, (int, float, np.integer, np.floating)) and 0 <= count < math.inf
    if count is not None and not good:
        raise StepError(
            f"{place} returned num_targets {describe_value(count)}; return the number of targets that the loss is "
            "averaged over, for instance 'num_targets': targets.numel()"
        )
    return count


def _check_loss(place: str, loss: Any) -> None:
    """Refuse a loss that cannot be differentiated."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"{place} returned a loss of type {type(loss).__name__}; return the tensor, without .item() or float()"
        )
    if loss.numel() != 1:
        raise StepError(f"{place} returned a loss of shape {tuple(loss.shape)}; reduce it to a scalar: loss.mean()")
    if not loss.requires_grad:
        raise StepError(
            f"{place} returned a loss with requires_grad=False; compute it from self.model(...), without .detach(), "
            "torch.no_grad() and torch.inference_mode(). If all parameters are frozen, unfreeze some: "
            "model.requires_grad_(True)"
        )


def check_metrics(name: str, metrics: Any) -> dict[str, float]:
    """Return the metrics that a method of the user returned as floats; refuse what cannot be converted."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise StepError(f"{name} returned {type(metrics).__name__} {describe_value(metrics)}; return a dict of numbers")
    numbers = {}
    for key, value in metrics.items():
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise StepError(
                f"{name} returned {key!r} of type {type(value).__name__} {describe_value(value)}; return a number, for "
                f"instance the mean"
            ) from None
    return numbers
