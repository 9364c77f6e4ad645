"""The guard against losses and gradients that are NaN or infinite: looked at before the optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zae.errors import NonFiniteError
from zae.values.strides import has_own_elements
from zae.values.walk import nonfinite_in

if TYPE_CHECKING:
    from zae.loop.processes import Processes
    from zae.loop.progress import ProgressChecker
    from zae.loop.step_output import StepOutput
    from zae.optim.optimization import Optimization

__all__ = ["MAX_DELAY_STEPS", "NonFiniteGuard"]

_log = logging.getLogger("zae")

MAX_DELAY_STEPS = 64
"""On an accelerator, after how many steps at most a loss has been looked at."""

_MAX_COPY_BYTES = 16 * 2**20
"""Bytes of the largest buffer that is copied before each step: statistics are small, large buffers are constants."""

_REMEDY = (
    "Look for a division by 0, a log of 0 or a bad sample (AnomalyAddon names the module and the operation), lower the "
    "learning rate, or clip with gradient_clip=1.0; on_nonfinite='skip' skips such steps"
)
_NO_TARGETS = (
    "A batch has num_targets 0, and the mean over no target is NaN: divide the sum by num_targets.clamp(min=1), for "
    "instance cross_entropy(logits, labels, reduction='sum') / num_targets.clamp(min=1)"
)


class NonFiniteGuard:
    """Looks at each loss, and at the gradient norm where clipping computes it, before the optimizer steps.

    On the CPU, and with "skip" everywhere, it looks before each step. On an accelerator, where a look makes the host
    wait for the device, "raise" and "warn" look at the last `MAX_DELAY_STEPS` steps at once, and always before a
    state is read: the error comes late there, and a checkpoint is never of weights that a bad step has moved.

    With a scale of the loss, an overflowing gradient is not an error.

    With "skip", or with ``keeps_buffers``, the buffers of the model are copied before each step: a forward that makes a
    NaN puts it into the statistics of BatchNorm as well, where it stays for ever. A step that is left out gives them
    back.
    """

    def __init__(self, policy: str, optimization: Optimization) -> None:
        self.policy = policy
        self.optimization = optimization
        self.keeps_buffers = False
        # Copies of buffers before a step: where each is, of a module and by its name, the buffer, and the copy.
        self._copies: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        # On an accelerator: steps, with losses and norms of theirs that were not looked at yet.
        self._pending: list[tuple[int, Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": [], "_pending": []}

    def begin_step(self, model: nn.Module) -> None:
        """Copy the buffers that a forward may change, where a step may be left out."""
        if self.policy != "skip" and not self.keeps_buffers:
            return
        self._copies = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and _is_copied(buffer):
                    self._copies.append((module._buffers, name, buffer, buffer.detach().clone()))

    def restore_buffers(self) -> None:
        """Put the buffers of before the step back, with their values, as it is left out."""
        with torch.no_grad():
            for owner, name, buffer, copied in self._copies:
                is_resized = (buffer.shape, buffer.dtype) != (copied.shape, copied.dtype)
                owner[name] = copied if is_resized else buffer.copy_(copied)

    def should_step(self, outputs: Sequence[StepOutput], progress: ProgressChecker, processes: Processes) -> bool:
        """Return whether the optimizer may step: False only with "skip"; "raise" raises before anything is stepped.

        ``progress`` counts the steps that are not finite; ``processes`` are the hooks of the trainer for several ranks.
        """
        norm = self.optimization.grad_norm
        numbers = []
        for values, _ in outputs:  # Not a comprehension: it would be one more call in each step.
            numbers.append(values["loss"])
        if norm is not None and not processes.precision_part.is_scaled:
            numbers.append(norm)
        is_bad = False
        for number in numbers:
            # Most losses are a tensor on the host: they are looked at here, without a further call.
            if type(number) is Tensor and number.is_cpu:
                value = number.item()
                if value - value:  # Of NaN and of the infinities this is NaN.
                    is_bad = True
            elif self._look(number, progress):
                is_bad = True
        is_bad_here = is_bad
        if self.policy == "skip" and processes.world_size > 1:
            # The NaN of one rank is in the gradients of every rank, but in its own loss only: all ranks skip the step.
            is_bad = float(processes.reduce(torch.tensor(float(is_bad), device=processes.device))) > 0
        if is_bad:
            should_step = self._apply_policy(outputs, is_bad_here, progress, processes)
            if not should_step:
                self.restore_buffers()
            return should_step
        if self._pending and self._pending[-1][0] - self._pending[0][0] >= MAX_DELAY_STEPS - 1:
            self.read_pending(progress, processes)
        return True

    def read_pending(self, progress: ProgressChecker, processes: Processes) -> None:
        """Look at the steps that wait on an accelerator."""
        if not self._pending:
            return
        steps = [step for step, _ in self._pending]
        values = torch.stack([number.float() for _, number in self._pending]).tolist()  # One wait for all of them.
        bad: dict[int, float] = {}
        for step, value in zip(steps, values):
            if not math.isfinite(value):
                bad.setdefault(step, value)
        self.clear_pending()
        if not bad:
            return
        progress.nonfinite_steps += len(bad)
        step, value = next(iter(bad.items()))
        text = (
            f"the loss or the gradient norm of step {step} was {value} (seen after step "
            f"{progress.step}: on {processes.device.type} it is read every {MAX_DELAY_STEPS} steps, and before "
            f"anything is saved); {self._rates()}"
        )
        if self.policy == "raise":
            raise NonFiniteError(
                f"{text}. The weights have changed since; resume from the newest checkpoint, which was saved before "
                f"step {step}. {_REMEDY}"
            )
        _log.warning("%s; %d such steps were taken", text, progress.nonfinite_steps)

    def clear_pending(self) -> None:
        """Leave out the steps that wait on an accelerator: the run continues from a state before them."""
        self._pending = []

    def _look(self, value: Tensor | Mapping[str, Tensor], progress: ProgressChecker) -> bool:
        """Look at one loss, at several, or at a norm; on an accelerator later, where the policy allows it."""
        if isinstance(value, Mapping):
            are_bad = [self._look(part, progress) for part in value.values()]  # A list: each is looked at.
            return any(are_bad)
        if value.is_cpu or self.policy == "skip":
            return not math.isfinite(value.item())
        # A copy: it may be the static output of a CUDA graph.
        self._pending.append((progress.step + 1, value.detach().clone().reshape(())))
        return False

    def _apply_policy(
        self, outputs: Sequence[StepOutput], is_bad_here: bool, progress: ProgressChecker, processes: Processes
    ) -> bool:
        """Apply the policy to a step that is not finite, here or on another rank; return whether it is taken."""
        text = self._describe_step(outputs, is_bad_here, progress)
        if self.policy == "raise":
            spoilt = _spoilt_statistics(processes.unwrap())
            also = f" Its forward has put NaN or infinite values into {', '.join(spoilt)}." if spoilt else ""
            raise NonFiniteError(
                f"{text}. The optimizer did not step: the weights are those after step {progress.step}.{also} {_REMEDY}"
            )
        progress.nonfinite_steps += 1
        is_power_of_two = progress.nonfinite_steps & (progress.nonfinite_steps - 1) == 0
        if is_power_of_two:  # The 1st, 2nd, 4th, 8th: not a flood.
            done = "left out" if self.policy == "skip" else "taken all the same"
            _log.warning("%s. The step was %s; %d so far", text, done, progress.nonfinite_steps)
        return self.policy != "skip"

    def _describe_step(self, outputs: Sequence[StepOutput], is_bad_here: bool, progress: ProgressChecker) -> str:
        """Say which step is not finite, with its numbers on this rank and the learning rates."""
        first = progress.epoch_batch + 1
        last = progress.epoch_batch + len(outputs)
        batches = f"batch {first}" if len(outputs) == 1 else f"batch {first} to {last}"
        place = f"step {progress.step + 1} (epoch {progress.epoch + 1}, {batches})"
        numbers = "; ".join(_format_numbers(values) for values, _ in outputs)
        norm = self.optimization.grad_norm
        if norm is not None:
            numbers += f", gradient norm {float(norm):g}"
        if is_bad_here:
            text = f"{place} is not finite: {numbers}; {self._rates()}"
        else:
            text = f"{place} is not finite on another rank (here: {numbers}); {self._rates()}"
        for values, _ in outputs:
            count = values.get("num_targets")
            if count is not None and not float(count):
                return f"{text}. {_NO_TARGETS}"
        return text

    def _rates(self) -> str:
        return ", ".join(f"{key} {value:g}" for key, value in self.optimization.learning_rates().items())


def _is_copied(buffer: Tensor) -> bool:
    """Return whether a buffer can be copied and written to, and is not so large that each step would be slower."""
    if nn.parameter.is_lazy(buffer) or buffer.is_meta or buffer.numel() * buffer.element_size() > _MAX_COPY_BYTES:
        return False
    return has_own_elements(buffer)


def _spoilt_statistics(model: nn.Module) -> list[str]:
    """Name the running statistics that are not finite; other buffers, masks for instance, may be so from the start."""
    statistics = {}
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2].startswith("running_") and not nn.parameter.is_lazy(buffer):
            statistics[name] = buffer
    return nonfinite_in(statistics)


def _format_numbers(out: Mapping[str, Any]) -> str:
    """Return the numbers that a step returned, as text."""
    parts = []
    for key, value in out.items():
        if isinstance(value, Mapping):
            parts.append(f"{key} ({_format_numbers(value)})")
        elif isinstance(value, Tensor) and value.numel() == 1:
            parts.append(f"{key} {float(value.detach()):g}")
        elif isinstance(value, (int, float)):
            parts.append(f"{key} {float(value):g}")
    return ", ".join(parts)
