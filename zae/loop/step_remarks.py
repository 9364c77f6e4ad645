"""Say, once in a run, what a step returns that is used, and was probably meant otherwise.

That is an entry that looks like a metric and is no number, and a batch whose samples are not known.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from zae.compose.introspect import is_overridden
from zae.values.walk import leading_dimension, leaves_of

if TYPE_CHECKING:
    from zae.loop.epoch_log import EpochLog
    from zae.loop.run import Run

__all__ = ["NotNumber", "not_number", "report_not_numbers", "report_unknown_samples"]

_PLAIN_TYPES = (bool, int, float, np.number, np.bool_, type(None))  # A batch of these, in a range(100) for instance.
_INDEX_TYPES = ("int64", "uint64")  # Of classes and tokens; comparisons and counts are of other types.


class NotNumber(NamedTuple):
    """An entry of a step that is not a number."""

    what: str
    """What it is, with its shape."""
    remedy: str
    """What to return for a metric."""
    may_be_metric: bool
    """Whether it looks like a metric whose mean was forgotten, and not like an output of the model."""

    def text(self, key: str) -> str:
        """Say that the entry of this name is no metric, and what to return instead."""
        return f"{key!r} as {self.what}, which is not a number; for a metric return {self.remedy}"


def not_number(key: str, value: Any) -> NotNumber:
    """Describe an entry of a step that is not a number."""
    if not isinstance(value, (Tensor, np.ndarray)):
        is_number = isinstance(value, numbers.Number)
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        are_numbers = is_list and all(isinstance(entry, numbers.Number) for entry in value)
        description = f"a {type(value).__name__}" + (f" of {len(value)} entries" if is_list else "")
        return NotNumber(description, "one number, for instance its mean", is_number or are_numbers)
    kind = str(value.dtype).removeprefix("torch.")
    of_shape = f"{'a tensor' if isinstance(value, Tensor) else 'an array'} of shape {tuple(value.shape)}"
    is_float = kind.startswith(("float", "bfloat"))
    to_float = ".float()" if isinstance(value, Tensor) else ""
    remedy = f"its mean: {key}{'' if is_float else to_float}.mean()"
    # One for each sample, or what is right among predictions; classes and tokens are of the types of indices.
    may_be_metric = kind == "bool" or (value.ndim <= 1 and kind not in _INDEX_TYPES)
    return NotNumber(of_shape, remedy, may_be_metric)


def report_not_numbers(run: Run, log: EpochLog, step: str) -> None:
    """Name, once each, the entries of a step that are no numbers and look like metrics."""
    trainer = run.trainer
    if log.keeps or is_overridden(trainer, "metric_on_epoch_end"):  # Something may read them.
        return
    for key, entry in log.not_numbers.items():
        if entry.may_be_metric and trainer.history.is_first_remark(key):
            run.report(f"{type(trainer).__name__}.{step} returned {entry.text(key)}", logging.WARNING)


def report_unknown_samples(run: Run, batch: Any, values: Mapping[str, Any]) -> None:
    """Say, once, that the means of an epoch cannot weigh the batches by their samples."""
    trainer = run.trainer
    if values.get("num_targets") is not None or is_overridden(trainer, "sample_weight"):
        return
    reason = _why_samples_are_unknown(batch)
    if reason and trainer.history.is_first_remark("the weight of a batch"):
        run.report(
            f"cannot tell how many samples a batch has: {reason}. The means of an epoch weigh each sample alike only "
            "if all batches have as many samples; else return 'num_targets' from the step, or override "
            "sample_weight(batch, num_targets)",
            logging.WARNING,
        )


def _why_samples_are_unknown(batch: Any) -> str:
    """Say why the number of samples in a batch is not known; an empty text where it is, or where each batch is one."""
    if isinstance(batch, PackedSequence):
        return ""
    leaves = [leaf for _, leaf in leaves_of(batch) if not isinstance(leaf, _PLAIN_TYPES)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray))]
    sizes = dict.fromkeys(size for size in map(leading_dimension, tensors) if size is not None)
    if len(sizes) > 1:
        several = ", ".join(map(str, [*sizes][:4]))
        return f"its tensors have different first dimensions ({several}), and the first tensor counts"
    if sizes or not leaves or len(tensors) == len(leaves):
        return ""
    return f"it has no tensor that zae knows of ({type(batch).__name__}), and so each batch counts alike"
