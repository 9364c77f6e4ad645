"""Measure a run: samples, tokens and steps a second, the time of a step, waiting for data, FLOPs and memory."""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from zae.addon import AddOnBase, Description
from zae.arguments import Interval
from zae.errors import ConfigError, kind_of
from zae.loop.step_output import StepOutput
from zae.values.describe import describe_batch
from zae.values.walk import leading_dimension

__all__ = ["ThroughputAddon"]


class _Meter:
    """What was measured since the last record."""

    def __init__(self) -> None:
        self.is_warm = False  # Whether the first step of this process is over.
        self.is_counted = False  # Whether its operations are known.
        self.why_not: str | None = None  # Why they are not to be counted; None until the first step.
        self.counted_samples: int | None = None  # Those of the step whose operations were counted.
        self.began: float | None = None
        self.ended: float | None = None  # When the last step ended; moved on by what is not measured.
        self.paused = 0.0
        self.clear()

    def clear(self) -> None:
        """Begin to measure again."""
        self.seconds = array("d")
        self.waited = 0.0
        self.wait = 0.0
        self.late = 0.0
        self.batches = 0
        self.new_batches = 0
        self.samples: int | None = 0  # None where a batch does not say how many it has.
        self.new_samples: int | None = 0
        self.tokens: Any = 0
        self.new_tokens: Any = 0


class ThroughputAddon(AddOnBase):
    """Add the speed of training to each record of the log.

    A record of training has, of the steps since the last one:

    - ``throughput/batches_per_second`` and ``steps_per_second``; ``samples_per_second``, unless a batch contains no
      tensor; and ``tokens_per_second``, where the tokens are known;
    - ``throughput/step_seconds_p50`` and ``step_seconds_p99``: the median and the 99th percentile of a step, with the
      wait for its batches, without validations and saves;
    - ``throughput/data_wait_share``: the share of that time in which the loader was waited for;
    - ``throughput/flops_per_second`` of one rank, and with ``peak_flops`` ``mfu``, the share of the peak of its device;
    - ``throughput/peak_memory_mib``: allocated on an accelerator, else resident in the process.

    Every logger, ``log_history`` and the report show them. Rank 0 measures: its samples are multiplied by the number of
    ranks with other batches. On an accelerator the host runs ahead of the device: the wait for it before a record is
    read is in the rates, and the percentiles are those of the host. Weights are bitwise the same with and without the
    add-on.

    Parameters
    ----------
    throughput_tokens : callable, optional
        A function of a batch that returns the number of its tokens; by default ``num_targets`` is counted, where steps
        return it.
    count_flops : bool
        Whether the floating-point operations of the first step of this process are counted, by
        ``torch.utils.flop_counter``: matrix products, convolutions and attention, forward and backward, with what is
        computed again in the backward; recurrent layers are not. That step takes longer, and is not in the rates.
        Other steps count by their samples. A compiled step hides operations: with CompileAddon they are not counted.
    peak_flops : float, optional
        The operations a second that one device can make, as its maker states them for the type of the matrix products:
        989e12 in bfloat16 for an H100 SXM.

    Raises
    ------
    ConfigError
        An option has an invalid value.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import ThroughputAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))] * 5
    >>> trainer = PlainTask.add_on(ThroughputAddon)(model, "cpu", optimizer=torch.optim.SGD)
    >>> _ = trainer.run(1, batches)
    >>> record = trainer.log_history[-1]
    >>> record["throughput/samples_per_second"] > 0, trainer.step_flops
    (True, 32)
    """

    layer = "observe"
    step_flops: int | None
    outside = ("writes_records",)
    _meter: _Meter

    def __init__(
        self,
        *args: Any,
        throughput_tokens: Annotated[Callable[[Any], int], "a function of a batch"] | None = None,
        count_flops: bool = True,
        peak_flops: Annotated[float, Interval("[1, inf)")] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.throughput_tokens = throughput_tokens
        self.count_flops = count_flops
        self.peak_flops = peak_flops
        self.step_flops = None
        self._meter = _Meter()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Measure the wait for each batch, or window of batches."""
        batches = super().batches(loader)
        try:
            while True:
                began = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self._meter.wait = time.perf_counter() - began
                yield batch
        finally:
            if isinstance(batches, Iterator) and hasattr(batches, "close"):
                batches.close()

    def on_step_begin(self, batch: Any) -> None:
        """Begin a step."""
        self._meter.new_samples = 0
        self._meter.new_batches = 0
        self._meter.new_tokens = 0
        self._meter.began = time.perf_counter()
        super().on_step_begin(batch)

    def to_device(self, batch: Any) -> Any:
        """Count the samples of a batch."""
        is_new = self._meter.new_batches == self.current_run.activity.micro_index  # Not when it is repeated.
        if self.mode == "train" and is_new:
            samples = leading_dimension(batch)
            before = self._meter.new_samples
            self._meter.new_samples = None if samples is None or before is None else before + samples
            self._meter.new_batches += 1
            if self.throughput_tokens is not None:
                self._meter.new_tokens += _count(self.throughput_tokens, batch)
        return super().to_device(batch)

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Count the operations of the first step."""
        if self._meter.why_not is None:
            self._meter.why_not = self._why_not_counted()
        if self._meter.is_counted or self._meter.why_not:
            return super().gradients(batch)
        self._meter.began = None  # A step that is counted takes longer.
        with FlopCounterMode(display=False) as counter:
            outputs = super().gradients(batch)
        self._meter.is_counted = True
        self.step_flops = counter.get_total_flops()
        self._meter.counted_samples = self._meter.new_samples
        return outputs

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """End a step."""
        super().on_step_end(outputs)
        began = self._meter.began
        self._meter.began = None
        self._meter.ended = time.perf_counter()
        if not self._meter.is_warm:  # The first step of a process, with all that happens only once.
            self._meter.is_warm = True
            self._meter.clear()
        elif began is not None:
            self._meter.seconds.append(self._meter.ended - began + self._meter.wait)
            self._meter.waited += self._meter.wait
            samples = self._meter.new_samples
            before = self._meter.samples
            self._meter.samples = None if samples is None or before is None else before + samples
            self._meter.batches += self._meter.new_batches
            if self.throughput_tokens is None:
                counts = [output.num_targets for output in outputs]
                self._meter.new_tokens = sum(counts) if None not in counts else 0
            self._meter.tokens = self._meter.tokens + self._meter.new_tokens
        self._meter.wait = 0.0

    def checkpoint(self) -> None:
        """Leave the time of a save out."""
        began = time.perf_counter()
        super().checkpoint()
        self._leave_out(began)

    def on_validation_begin(self) -> None:
        """Note when a validation begins."""
        super().on_validation_begin()
        self._meter.paused = time.perf_counter()

    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        """Leave the time of a validation out."""
        super().on_validation_end(metrics)
        self._leave_out(self._meter.paused)

    def _leave_out(self, began: float) -> None:
        if self._meter.ended is not None:
            self._meter.ended += time.perf_counter() - began

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the rates to a record of training."""
        if self.mode == "train" and self._meter.seconds and any(str(key).startswith("train/") for key in metrics):
            if self._meter.ended is not None:  # The loss was read, which waits for an accelerator.
                self._meter.late = time.perf_counter() - self._meter.ended
            metrics = {**metrics, **{f"throughput/{name}": value for name, value in self.rates().items()}}
            self._meter.clear()
        super().log(metrics, step)

    def rates(self) -> dict[str, float]:
        """Return what was measured since the last record, by name."""
        seconds = math.fsum(self._meter.seconds) + self._meter.late
        ranks = self.engine.dp_world_size
        if not seconds:
            return {}
        ordered = sorted(self._meter.seconds)
        tokens = float(self._meter.tokens)
        samples = self._meter.samples
        rates = {
            **({} if samples is None else {"samples_per_second": samples * ranks / seconds}),
            "batches_per_second": self._meter.batches * ranks / seconds,
            "steps_per_second": len(ordered) / seconds,
            **({"tokens_per_second": tokens * ranks / seconds} if tokens else {}),
            "step_seconds_p50": ordered[(len(ordered) - 1) // 2],
            "step_seconds_p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
            "data_wait_share": self._meter.waited / seconds,
        }
        if self.step_flops:
            of_one = self._meter.counted_samples
            steps = samples / of_one if samples is not None and of_one else len(ordered)
            rates["flops_per_second"] = self.step_flops * steps / seconds
            rates |= {"mfu": rates["flops_per_second"] / self.peak_flops} if self.peak_flops else {}
        memory = _peak_memory(self.device)
        return rates | ({"peak_memory_mib": memory / 2**20} if memory else {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which measures for itself."""
        return {**super().__getstate__(), "_meter": _Meter()}

    def describe(self) -> list[Description]:
        """Tell what the share of the peak is of."""
        why_not = self._why_not_counted()
        if self.count_flops and why_not:
            return [*super().describe(), Description("operations are not counted", why_not, where="on_step_end")]
        share = f"the share of {self.peak_flops:.4g} FLOP/s" if self.peak_flops else None
        return [*super().describe(), Description("throughput/mfu", share, where="on_step_end")]

    def _why_not_counted(self) -> str:
        """Return why the operations of a step are not counted; empty where they are."""
        if not self.count_flops:
            return "count_flops=False"
        return "a compiled step hides them" if self.changed_modules("compiled") else ""


def _count(tokens: Callable[[Any], Any], batch: Any) -> Any:
    """Return the tokens of a batch; refuse what is not a number."""
    try:
        count = tokens(batch)
    except Exception as error:
        error.add_note(f"zae: raised by throughput_tokens, for the batch {describe_batch(batch)}")
        raise
    is_number = isinstance(count, (int, float, np.number)) or (isinstance(count, torch.Tensor) and count.numel() == 1)
    if not is_number:
        raise ConfigError(
            f"throughput_tokens returned {kind_of(count)}; return the number of tokens of a batch, for instance "
            "lambda batch: batch['input_ids'].numel()"
        )
    return count


def _peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that were in use so far; 0 where that is not known."""
    of_device = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    if of_device is not None:
        return int(of_device(device))
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
