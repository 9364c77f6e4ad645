"""Compute a batch that does not fit in memory in parts, and keep the weights of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zae.addon import AddOnBase, Fact, repeats
from zae.addons.auto_batch.parts import StepStart, check_layers, check_mean, largest_part
from zae.common.argument_checks import check_count
from zae.common.device import is_out_of_memory, release_memory
from zae.common.walk import leading_dimension, map_tensors
from zae.data.rows import join, take_apart, take_rows
from zae.errors import ConfigError, DistributedError, StepError
from zae.loop.step_output import StepOutput

__all__ = ["AutoBatchAddon"]

_log = logging.getLogger("zae")
_CHECKED = 8  # Samples whose losses are compared with that of all of them.


class AutoBatchAddon(AddOnBase):
    """Compute a batch that does not fit in memory in parts; the step is that of the whole batch.

    Where the forward or backward of a batch runs out of memory, what the step has computed so far is dropped, and its
    batches are computed again in parts of half as many samples; so are all later ones. Each sample has the weight that
    it has in the whole batch, and where ``train_step`` returns ``num_targets``, each target: the gradient is that of
    the whole batch, up to rounding (1e-12 in float64). The optimizer, schedules, counters and history see one batch:
    numbers are means over its parts, ``num_targets`` is a sum, and tensors with one row for each sample are
    concatenated.

    ``train_step`` must have a loss that is a mean over the samples of its batch, or return ``num_targets``. It is
    checked on a few samples when a batch is divided for the first time. Layers that mix samples, BatchNorm for
    instance, are refused.

    Parts draw their random numbers one after the other: dropout has other masks than in the whole batch, of the same
    distribution. A run with the same parts is bitwise reproducible, and a resumed run continues with them.

    With several ranks, all of them repeat the step when one has run out of memory, and divide alike. They exchange
    gradients after the backward, not during it. Where each forward is an exchange between ranks (FSDPAddon,
    TensorParallelAddon), a step cannot be repeated: write ``micro_batch_size``.

    Parameters
    ----------
    micro_batch_size : int, optional
        The largest number of samples that are computed at once; None divides a batch only when memory has run out.

    Attributes
    ----------
    fitting_size : int or None
        The largest number of samples that are computed at once since memory has run out. Checkpoints contain it.
    memory_errors : list of dict
        For each time that memory ran out, ``step``, ``samples`` (that did not fit) and ``fitting_size`` (from then on).

    Raises
    ------
    ConfigError
        The option is invalid; the model has layers that mix samples; or a batch cannot be divided.
    StepError
        One sample alone does not fit; the loss is not a mean; or ``train_step`` changes weights or buffers.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import AutoBatchAddon
    >>> from zae.testing import PlainTask
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> trainer = PlainTask.add_on(AutoBatchAddon)(model, "cpu", optimizer=optimizer, micro_batch_size=3)
    >>> metrics = trainer.run(1, [(torch.ones(8, 2), torch.ones(8, 1))] * 4)
    >>> metrics["step"], trainer.fitting_size
    (4, None)
    """

    layer = "control"
    traits = ("repeats_gradients",)
    excludes = {
        "keeps_gradients": "its engine cannot take the gradients of a step back; leave AutoBatchAddon out, and write "
        "GradientAccumulationAddon with a smaller batch size, which zae.find_batch_size finds",
        "divides_batches": "a pipeline divides each batch itself; leave AutoBatchAddon out, and write more "
        "pipeline_microbatches",
    }
    state_attributes = ("fitting_size", "memory_errors")
    process_attributes = {"_start": None, "_was_compared": False, "_unjoined": set()}

    def __init__(self, *args: Any, micro_batch_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_size = check_count("micro_batch_size", micro_batch_size, optional=True)
        self.fitting_size: int | None = None
        self.memory_errors: list[dict[str, Any]] = []
        self.step_window.may_restart = True
        self._start: StepStart | None = None  # Of the present step, where it can be repeated.
        self._computing = 0  # The samples whose gradient is being computed.
        self._share: float | None = None  # Of the present part in its batch.
        self._is_last = False
        self._is_divided = False
        self._was_compared = False
        self._unjoined: set[str] = set()  # Entries of outputs that a warning has named.

    def setup(self) -> None:
        """Refuse a model whose layers mix samples."""
        super().setup()
        self.engine.reduces_after_backward = True  # A rank whose memory runs out leaves no other waiting.
        if self.mode == "train":
            check_layers(self.unwrap())

    @property
    def _is_fixed(self) -> bool:
        """Whether the ranks exchange something in each forward, so that none can begin a step again."""
        return self.world_size > 1 and (
            self.engine.needs_lockstep_forward or self.engine.dp_world_size < self.world_size
        )

    # ----------------------------------------------------------------------------------------------- out of memory

    @repeats
    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Compute the gradients; where memory runs out on a rank, again with smaller parts."""
        start = None if self._is_fixed else StepStart(self, self._open_generators())
        self._start = start
        while True:
            self._is_divided = False
            self._computing = 0
            try:
                return super().gradients(batch)
            except _OtherRankError as other:
                self._shrink(other.sizes)
            except Exception as error:
                if not self._computing or not is_out_of_memory(error):
                    raise
                if start is None:
                    error.add_note(self._why_fixed())
                    raise
                if self._computing < 0:
                    raise ConfigError(
                        f"memory ran out, and a batch of type {type(self.current_run.batch).__name__} does not say how "
                        "many samples it has, and cannot be divided; let the loader yield tensors with one row for "
                        "each sample"
                    ) from error
                self._shrink(self._agree(self._computing), error)
            finally:
                self._share = None
            release_memory()  # Without the exception, whose traceback holds what the step has computed.
            if start is not None:
                start.restore()

    def normalize(self, num_targets: list[Any]) -> None:
        """Let all ranks begin again where one has run out of memory; divide by the targets of all parts."""
        if self.world_size > 1 and self._start is not None:
            sizes = self._agree(0)
            if any(sizes):
                raise _OtherRankError(sizes)
        if self._is_divided and len(num_targets) == 1 and self.engine.dp_world_size == 1 and num_targets[0] is not None:
            num_targets = [*num_targets, 0.0]  # A single batch is not divided by its targets; parts have to be.
        super().normalize(num_targets)

    def _agree(self, samples: int) -> list[int]:
        """Return how many samples did not fit on each rank, 0 where all did."""
        own = torch.zeros(self.world_size, dtype=torch.float64)
        own[self.rank] = samples
        return [int(each) for each in self.reduce(own).tolist()]

    def _shrink(self, sizes: list[int], error: Exception | None = None) -> None:
        """Choose smaller parts, or refuse where one sample alone does not fit."""
        step = self.progress_checker.step + 1
        samples = max(sizes)
        if 1 in sizes:
            kind = StepError
            where = ""
            if error is None:
                kind = DistributedError  # type: ignore[assignment]
                where = f"rank {sizes.index(1)}: "
            raise kind(
                f"{where}one sample alone does not fit in memory in step {step}; train in lower precision (AMPAddon), "
                "compute activations twice (GradientCheckpointingAddon), or shard the model (FSDPAddon)"
            ) from error
        self.fitting_size = largest_part(sizes)
        found = {"step": step, "samples": samples, "fitting_size": self.fitting_size}
        self.memory_errors = [*self.memory_errors, found]
        self.step_window.restarts += 1
        if self.is_main:
            _log.warning(
                "step %d: %d samples do not fit in memory; batches are computed in parts of at most %d",
                step,
                samples,
                self.fitting_size,
            )

    def _why_fixed(self) -> str:
        size = max(1, self._computing // 2)
        return (
            f"zae: {self._computing} samples did not fit in memory on rank {self.rank}, and the ranks exchange parts "
            "of the model in each forward, so that AutoBatchAddon cannot begin the step again; resume with "
            f"micro_batch_size={size}"
        )

    # ---------------------------------------------------------------------------------------------------- the parts

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Note whether it is the last batch of the window."""
        self._is_last = last
        return super().sync_context(last)

    @repeats
    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Compute a batch at once, or in parts."""
        if self._start is not None:
            self._start.begin()
        samples = leading_dimension(batch) or -1
        self._computing = samples
        parts = self._count_parts(samples)
        if parts == 1:
            found = super().micro_step(batch, count)
            self._computing = 0
            return found
        if not self._was_compared and samples > 1 and not self._is_fixed:
            self._check_parts(batch, samples)
        self._is_divided = True
        is_last = self._is_last
        divided, rows, _ = take_apart(batch, samples, parts)
        outputs = []
        rewind = self._open_generators().rewind_shared()
        for index, part in enumerate(divided):
            rewind()  # What all ranks draw alike is the same in each part, and moves on as for one batch.
            # A rank with few samples takes part in the exchanges of the others, with a weight of 0.
            self._share = rows[index] / samples
            self._computing = rows[index] or 1
            part = part if rows[index] else divided[0]
            with self.sync_context(is_last and index == parts - 1):
                values, weight = super().micro_step(part, count)
            if rows[index]:
                outputs.append((map_tensors(Tensor.detach, values), weight))
        self._share = None
        self._computing = 0
        if self._start is not None:
            self._start.check("train_step changes")
        return self._joined(outputs, [each for each in rows if each])

    def _count_parts(self, samples: int) -> int:
        """Return in how many parts a batch of so many samples is computed, on all ranks alike where they must."""
        limits = self._limits()
        if not limits:
            return 1
        if self._is_fixed and self.engine.needs_lockstep_forward:
            samples = max(self._agree(samples))
        return max(1, -(-samples // min(limits)))

    def _limits(self) -> list[int]:
        return [each for each in (self.micro_batch_size, self.fitting_size) if each is not None]

    def _check_parts(self, batch: Any, samples: int) -> None:
        """Check, before the first division, that parts give the gradient of the whole."""
        check_layers(self.unwrap())
        try:
            few = min(samples, _CHECKED)
            check_mean(self, [take_rows(batch, samples, *bounds) for bounds in ((0, few), *pairwise(range(few + 1)))])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self._was_compared = True

    def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
        """Scale the loss of a part by its share of the samples, unless its targets are counted."""
        share = self._share
        if share is None:
            return super().scale_loss(loss, num_targets, count)
        counted = num_targets is not None
        loss = super().scale_loss(loss, num_targets, count + 1 if counted else count)  # A single one is not scaled.
        factor = float(share > 0) if counted else share
        return {key: each * factor for key, each in loss.items()} if isinstance(loss, Mapping) else loss * factor

    def _joined(self, outputs: list[tuple[Any, Any]], rows: list[int]) -> tuple[Mapping[str, Any], float]:
        """Return the output of a batch from those of its parts."""
        weights = [float(weight) for _, weight in outputs]
        found: dict[str, Any] = {}
        where = f"{type(self).__name__}.train_step"
        for key in outputs[0][0]:
            try:
                found |= join([{key: values[key]} for values, _ in outputs], rows, weights, where)
            except (StepError, KeyError):
                if key not in self._unjoined and self.is_main:
                    _log.warning(
                        "the output %r of train_step cannot be put together from the parts of a batch, and is "
                        "left out; return a number, or one row for each sample",
                        key,
                    )
                self._unjoined.add(key)
        return found, sum(weights)

    # ------------------------------------------------------------------------------------------------ what is shown

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Record a change of what fits."""
        super().on_step_end(outputs)
        if self.memory_errors and self.memory_errors[-1]["step"] == self.progress_checker.step:
            self.log({"auto_batch/fitting_size": float(self.fitting_size or 0)}, self.progress_checker.step)

    def describe(self) -> list[Fact]:
        """Tell which batches may be divided."""
        return [*super().describe(), Fact("computed in parts", self._describe_parts, where="micro_step")]

    def _describe_parts(self, plan: Any) -> str:
        """Return which batches are divided, and refuse layers that forbid it."""
        check_layers(self.unwrap())
        size = self.fitting_size if self.micro_batch_size is None else self.micro_batch_size
        return "a batch that does not fit in memory" if size is None else f"batches of more than {size} samples"


class _OtherRankError(Exception):
    """Raised where another rank has run out of memory, with how many samples did not fit on each."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.sizes = sizes
