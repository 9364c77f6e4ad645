"""Measure a run: samples, tokens and steps a second, the time of a step, waiting for data, FLOPs and memory."""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from zae.addon import AddOnBase
from zae.common.argument_checks import check_flags, check_number
from zae.common.walk import leading_dimension
from zae.errors import ConfigError
from zae.loop.step_output import StepOutput

__all__ = ["PEAK_FLOPS", "ThroughputAddon"]

PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A40": 150e12,
    "A10": 125e12, "L4": 121e12, "RTX 4090": 165e12,
}  # fmt: skip
"""Dense bfloat16 matrix products a second by part of a device's name, as its maker states them."""


class _Meter:
    """What was measured since the last record."""

    def __init__(self) -> None:
        self.is_warm = False  # Whether the first step of this process is over.
        self.is_counted = False  # Whether its operations are known.
        self.began: float | None = None
        self.clear()

    def clear(self) -> None:
        """Begin to measure again."""
        self.seconds = array("d")
        self.waited = self.wait = 0.0
        self.samples = self.batches = self.new_samples = self.new_batches = 0
        self.tokens: Any = 0


class ThroughputAddon(AddOnBase):
    """Add the speed of training to each record of the log.

    A record of training has, of the steps since the last one:

    - ``throughput/samples_per_second``, ``batches_per_second``, ``steps_per_second`` and ``tokens_per_second``, where
      the tokens are known;
    - ``throughput/step_seconds_p50`` and ``step_seconds_p99``: the median and the 99th percentile of a step, with the
      wait for its batches, without validations and saves;
    - ``throughput/data_wait_share``: the share of that time in which the loader was waited for;
    - ``throughput/flops_per_second``, and ``mfu``, the share of the peak of the device, where that is known;
    - ``throughput/peak_memory_mib``: allocated on an accelerator, else resident in the process.

    Every logger, ``log_history`` and the report show them. Rank 0 measures: its samples are multiplied by the number of
    ranks with other batches. On an accelerator the host runs ahead of the device: rates over many steps are right, and
    the percentiles are those of the host. Weights are bitwise the same with and without the add-on.

    Parameters
    ----------
    throughput_tokens : callable, optional
        A function of a batch that returns the number of its tokens; by default ``num_targets`` is counted, where steps
        return it.
    count_flops : bool
        Whether the floating-point operations of the first step of this process are counted, by
        ``torch.utils.flop_counter``: matrix products, convolutions and attention, forward and backward. That step takes
        longer, and is not in the rates. A compiled step hides them: with CompileAddon they are not counted.
    peak_flops : float, optional
        The operations a second that one device can make; by default those of bfloat16 for the devices in
        ``PEAK_FLOPS``.

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
    outside = ("LoggerAddon",)

    def __init__(
        self,
        *args: Any,
        throughput_tokens: Callable[[Any], int] | None = None,
        count_flops: bool = True,
        peak_flops: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if throughput_tokens is not None and not callable(throughput_tokens):
            raise ConfigError(f"throughput_tokens={throughput_tokens!r}; it must be a function of a batch")
        self.throughput_tokens = throughput_tokens
        (self.count_flops,) = check_flags(count_flops=count_flops)
        self.peak_flops = None if peak_flops is None else check_number("peak_flops", peak_flops, 1.0)
        self.step_flops: int | None = None
        self._meter = _Meter()

    def is_idle(self) -> bool:
        """Return whether no training is measured."""
        return self.mode != "train"

    def batches(self, loader: Any) -> Iterator[Any]:
        """Measure the wait for each batch, or window of batches."""
        found = super().batches(loader)
        try:
            while True:
                began = time.perf_counter()
                try:
                    batch = next(found)
                except StopIteration:
                    return
                self._meter.wait = time.perf_counter() - began
                yield batch
        finally:
            if isinstance(found, Iterator) and hasattr(found, "close"):
                found.close()

    def on_step_begin(self, batch: Any) -> None:
        """Begin a step."""
        self._meter.new_samples = self._meter.new_batches = 0
        self._meter.began = time.perf_counter()
        super().on_step_begin(batch)

    def to_device(self, batch: Any) -> Any:
        """Count the samples of a batch."""
        if self.mode == "train" and self._meter.new_batches == self.current_run.micro_index:  # Not when it is repeated.
            self._meter.new_samples += leading_dimension(batch) or 1
            self._meter.new_batches += 1
            if self.throughput_tokens is not None and self._meter.is_warm:
                self._meter.tokens += self.throughput_tokens(batch)
        return super().to_device(batch)

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Count the operations of the first step; of the next one where AutoBatchAddon had to repeat it."""
        if self._meter.is_counted or self._why_not_counted():
            return super().gradients(batch)
        repeated = len(getattr(self, "memory_errors", ()))
        with FlopCounterMode(display=False) as counter:
            found = super().gradients(batch)
        if len(getattr(self, "memory_errors", ())) == repeated:
            flops = counter.get_total_flops() // self.current_run.computation
            self._meter.is_counted, self.step_flops = True, flops
        return found

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """End a step."""
        super().on_step_end(outputs)
        began, self._meter.began = self._meter.began, None
        if not self._meter.is_warm:  # The first step of a process, with all that happens only once.
            self._meter.is_warm = True
            self._meter.clear()
        elif began is not None:
            self._meter.seconds.append(time.perf_counter() - began + self._meter.wait)
            self._meter.waited += self._meter.wait
            self._meter.samples += self._meter.new_samples
            self._meter.batches += self._meter.new_batches
            if self.throughput_tokens is None:
                counts = [each.num_targets for each in outputs]
                self._meter.tokens = self._meter.tokens + sum(counts) if None not in counts else self._meter.tokens
        self._meter.wait = 0.0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the rates to a record of training."""
        if self.mode == "train" and self._meter.seconds and any(str(key).startswith("train/") for key in metrics):
            metrics = {**metrics, **{f"throughput/{name}": value for name, value in self.rates().items()}}
            self._meter.clear()
        super().log(metrics, step)

    def rates(self) -> dict[str, float]:
        """Return what was measured since the last record, by name."""
        seconds, ranks = math.fsum(self._meter.seconds), self.data_size
        if not seconds:
            return {}
        ordered, tokens = sorted(self._meter.seconds), float(self._meter.tokens)
        found = {
            "samples_per_second": self._meter.samples * ranks / seconds,
            "batches_per_second": self._meter.batches * ranks / seconds,
            "steps_per_second": len(ordered) / seconds,
            **({"tokens_per_second": tokens * ranks / seconds} if tokens else {}),
            "step_seconds_p50": ordered[(len(ordered) - 1) // 2],
            "step_seconds_p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
            "data_wait_share": self._meter.waited / seconds,
        }
        if self.step_flops:
            found["flops_per_second"] = self.step_flops * len(ordered) / seconds
            peak = self.peak_flops or _peak_of(self.device)
            found |= {"mfu": found["flops_per_second"] / peak} if peak else {}
        memory = _peak_memory(self.device)
        return found | ({"peak_memory_mib": memory / 2**20} if memory else {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which measures for itself."""
        return {**super().__getstate__(), "_meter": _Meter()}

    def plan_lines(self, plan: Any) -> list[str]:
        """Note what the share of the peak is of."""
        peak = self.peak_flops or _peak_of(self.device)
        note, why_not = f"throughput/mfu is the share of {peak:.4g} FLOP/s" if peak else "", self._why_not_counted()
        note = f"operations are not counted: {why_not}" if self.count_flops and why_not else note
        return [*super().plan_lines(plan), *([note] if note else [])]

    def _why_not_counted(self) -> str:
        """Return why the operations of a step are not counted; empty where they are."""
        if not self.count_flops:
            return "count_flops=False"
        names = {each.__name__ for each in type(self).__mro__}
        compiles = "CompileAddon" in names or bool(getattr(self, "compile_blocks", None))
        return "a compiled step hides them" if compiles else ""


def _peak_of(device: torch.device) -> float | None:
    """Return the operations a second of a device; None where they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if all(word in name for word in part.split())), None)


def _peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that were in use so far; 0 where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return 0
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024
