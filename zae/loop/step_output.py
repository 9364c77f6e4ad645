"""Read what ``train_step`` and ``test_step`` return: the only place that looks for the loss and the targets."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from zae.common.argument_checks import describe_batch, describe_value
from zae.common.walk import leading_dimension
from zae.compose.introspect import hook
from zae.errors import StepError

__all__ = ["StepOutput", "count_targets", "explain_failure", "loss_numbers", "read_output", "sample_weight"]


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
        return {str(key): loss_numbers(each) for key, each in loss.items()}
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
    if type(out) is not dict and not isinstance(out, Mapping):
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
    output = out, sample_weight(batch, num_targets)
    if count_targets is not None and (counted := count_targets(out, batch)) is not num_targets:
        output = {**out, "num_targets": counted}, output[1]
    return output


@hook
def count_targets(self: Any, values: Mapping[str, Any], batch: Any) -> Any:
    """Return the number of targets that weighs a micro-batch in its step; with None each weighs alike.

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
            f"zae: {owner.__name__}.train_step computes the loss, and backward(), optimizer.step() and "
            "zero_grad() are done for you; take them out of it"
        )


def _check_output(out: Mapping[str, Any], where: str, keys: list[str]) -> None:
    """Refuse a mapping whose loss cannot be differentiated, or whose number of targets is not one."""
    if "loss" not in out:
        found = ", ".join(map(repr, out)) or "none"
        near = difflib.get_close_matches("loss", list(map(str, out)), n=1)
        cure = f"rename {near[0]!r} to 'loss'" if near else "return {'loss': loss, ...}"
        raise StepError(f"{where} returned a dict without 'loss'; its keys are {found}; {cure}")
    loss = out["loss"]
    if isinstance(loss, Mapping):
        if not keys or set(map(str, loss)) != set(keys):
            raise StepError(
                f"{where} returned losses for {list(loss)}, but the optimizers are {keys or ['0']}; "
                "return one scalar loss, or a dict with one loss for each optimizer"
            )
        for key, each in loss.items():
            _check_loss(f"{where}, loss[{key!r}]", each)
    else:
        _check_loss(where, loss)
    _check_targets(where, out.get("num_targets"))


def _check_targets(where: str, count: Any) -> Any:
    """Return a number of targets, read from its tensor, or refuse what cannot be one."""
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    good = isinstance(count, (int, float, np.integer, np.floating)) and 0 <= count < math.inf
    if count is not None and not good:
        raise StepError(
            f"{where} returned num_targets {describe_value(count)}; return the number of targets that the loss is "
            "averaged over, for instance 'num_targets': targets.numel()"
        )
    return count


def _check_loss(where: str, loss: Any) -> None:
    """Refuse a loss that cannot be differentiated."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"{where} returned a loss of type {type(loss).__name__}; return the tensor, without .item() or float()"
        )
    if loss.numel() != 1:
        raise StepError(f"{where} returned a loss of shape {tuple(loss.shape)}; reduce it to a scalar: loss.mean()")
    if not loss.requires_grad:
        raise StepError(
            f"{where} returned a loss with requires_grad=False; compute it from self.model(...), without .detach() and "
            "without torch.no_grad(). If all parameters are frozen, unfreeze some: model.requires_grad_(True)"
        )
