"""The types of metrics: what a step returns instead of a plain number.

A plain number is averaged over the samples of an epoch. One of these says otherwise, beside plain numbers in the dict
that ``train_step`` or ``test_step`` returns. It holds over micro-batches, steps and ranks, in the history, the loggers
and checkpoints.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Last", "Max", "Mean", "Min", "Sum"]


class Mean(NamedTuple):
    """A mean with its own weight, for instance over tokens where the loss is a mean over samples.

    Parameters
    ----------
    value : float or Tensor
        The mean over one batch.
    weight : float or Tensor, optional
        How many items of the batch it is the mean of. A batch of weight 0 does not count, whatever its value is. By
        default the weight of plain numbers: ``num_targets``, else the batch size.

    Examples
    --------
    >>> from zae.loop.epoch_log import EpochLog
    >>> log = EpochLog()
    >>> for accuracy, tokens in ((0.5, 30), (1.0, 10)):
    ...     log.record({"accuracy": Mean(accuracy, tokens)})
    >>> log.means()
    {'accuracy': 0.625}
    """

    value: Any
    weight: Any = None


class Sum(NamedTuple):
    """A number that is added up over the batches of all ranks.

    Parameters
    ----------
    value : float or Tensor
        Of one batch.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     def test_step(self, batch):
    ...         return {**self.train_step(batch), "samples": Sum(len(batch))}
    >>> trainer = Task(torch.nn.Linear(2, 1), "cpu", mode="test")
    >>> trainer.evaluate([torch.ones(4, 2), torch.ones(1, 2)])["samples"]
    5.0
    """

    value: Any


class Max(NamedTuple):
    """A number whose maximum is kept; NaN if any is NaN.

    Parameters
    ----------
    value : float or Tensor
        Of one batch.

    Examples
    --------
    >>> from zae.loop.epoch_log import EpochLog
    >>> log = EpochLog()
    >>> for error in (0.5, 2.0, 1.0):
    ...     log.record({"worst": Max(error)})
    >>> log.means()
    {'worst': 2.0}
    """

    value: Any


class Min(NamedTuple):
    """A number whose minimum is kept; NaN if any is NaN.

    Parameters
    ----------
    value : float or Tensor
        Of one batch.

    Examples
    --------
    >>> from zae.loop.epoch_log import EpochLog
    >>> log = EpochLog()
    >>> for margin in (0.5, 0.25, 1.0):
    ...     log.record({"margin": Min(margin)})
    >>> log.means()
    {'margin': 0.25}
    """

    value: Any


class Last(NamedTuple):
    """A number whose last value is kept, in the order of the loader.

    In training on several ranks it is the value of the highest rank with a batch in the last step.

    Parameters
    ----------
    value : float or Tensor
        Of one batch.

    Examples
    --------
    >>> from zae.loop.epoch_log import EpochLog
    >>> log = EpochLog()
    >>> for temperature in (1.0, 0.5, 0.25):
    ...     log.record({"temperature": Last(temperature)})
    >>> log.means()
    {'temperature': 0.25}
    """

    value: Any
