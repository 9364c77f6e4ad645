"""The add-on that looks at the steps of a replay: losses, gradients, outputs, and where a NaN begins."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zae.addon import AddOnBase
from zae.common.model_weights import named_parameters
from zae.common.walk import dense_part, local_part, tensors_in
from zae.errors import ConfigError
from zae.loop.nonfinite import watching
from zae.loop.step_output import StepOutput, loss_numbers

__all__ = ["Replay", "ReplayAddon"]


@dataclass
class Replay:
    """The steps to look at, and what was found."""

    first: int
    last: int
    gone: frozenset[str] = frozenset()
    """Names of the add-ons whose state is not loaded."""
    raises: bool = False
    """Whether the run itself ends at a loss or a norm that is not finite."""
    began: int = 0
    """The step before the first one that was replayed."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class ReplayAddon(AddOnBase):
    """Note what happens in some steps, and end the run after them."""

    layer = "observe"
    replay = Replay(0, 0)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Leave out the states of the loggers, which a replay does not have."""
        super().load_state_dict({key: value for key, value in state.items() if key not in self.replay.gone}, strict)

    def on_run_begin(self) -> None:
        """Note where the replay begins."""
        super().on_run_begin()
        self.replay.began = self.progress_checker.step
        self._row: dict[str, Any] | None = None
        if self.replay.began >= self.replay.first:
            raise ConfigError(f"the checkpoint has step {self.replay.began}; give one before step {self.replay.first}")

    def on_step_begin(self, batch: Any) -> None:
        """Let a step that is not finite come to its end: it is in the ledger then."""
        super().on_step_begin(batch)
        if self.replay.raises:
            is_shown = self.progress_checker.step + 1 >= self.replay.first
            self.nonfinite.policy = "warn" if is_shown else "raise"

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Look at the outputs of all modules and at the gradients as they come, and note the losses."""
        progress = self.progress_checker
        self._row = None
        if not self.replay.first <= progress.step + 1 <= self.replay.last:
            return super().gradients(batch)
        row: dict[str, Any] = {"step": progress.step + 1, "epoch": progress.epoch + 1}
        row |= {"batch": progress.epoch_batch + 1, "outputs": {}, "gradients": {}, "module": None, "gradient": None}
        # Compiled code would be compiled again for the hooks, and might compute other bits.
        is_compiled = bool(self.changed_modules("compiled"))
        look, look_at_gradient = partial(_note_output, row), partial(_note_gradient, row)
        with contextlib.nullcontext() if is_compiled else watching(self.unwrap(), look, look_at_gradient):
            outputs = super().gradients(batch)
        row["losses"] = [loss_numbers(values["loss"]) for values, _ in outputs]
        self._row = row
        return outputs

    def clip(self) -> None:
        """Note the norm of each gradient, without a loss scale and before they are clipped."""
        if self._row is not None:
            self._row["gradients"] = {
                name: float(torch.linalg.vector_norm(dense_part(p.grad.detach()).float()))
                for name, p in named_parameters(self.unwrap()).items()
                if p.grad is not None
            }
        super().clip()

    def should_step(self, outputs: Sequence[StepOutput]) -> bool:
        """Finish the row of the step."""
        row = self._row
        if row is not None:
            row["norm"] = None if self.grad_norm is None else float(self.grad_norm)
            losses = [each for loss in row["losses"] for each in (loss.values() if isinstance(loss, dict) else [loss])]
            bad = [name for name, norm in row["gradients"].items() if not math.isfinite(norm)]
            row["gradient"] = row["gradient"] or (bad[-1] if bad else None)
            ends = not all(map(math.isfinite, [*losses, *([] if row["norm"] is None else [row["norm"]])]))
            row["is_finite"] = not (ends or bad or row["module"])
            self.replay.rows.append(row)
            if ends and self.replay.raises:
                self.replay.notes.append(f"the run itself ends at step {row['step']}: on_nonfinite='raise'")
                self.replay.last = row["step"]
        return super().should_step(outputs)

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """End the run after the last step."""
        super().on_step_end(outputs)
        if self.progress_checker.step >= self.replay.last:
            self.stop("the replay is over")


def _note_output(row: dict[str, Any], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """Note the range of what a module returns; of several calls the whole range, in the order of the last ones.

    Inner modules return before those around them, so that the first output that is not finite is of the innermost one.
    """
    values = _floats(output)
    if not values:
        return
    finite = torch.cat([each[each.isfinite()].reshape(-1).float() for each in values])
    known = row["outputs"].pop(name, {"least": None, "largest": None, "not_finite": 0, "count": 0})
    ends = [float(finite.min()), float(finite.max())] if finite.numel() else []
    count = sum(each.numel() for each in values)
    row["outputs"][name] = {
        "type": type(module).__name__,
        "least": min([*ends, *([] if known["least"] is None else [known["least"]])], default=None),
        "largest": max([*ends, *([] if known["largest"] is None else [known["largest"]])], default=None),
        "not_finite": known["not_finite"] + count - finite.numel(),
        "count": known["count"] + count,
    }
    if row["module"] is None and finite.numel() < count:
        row["module"] = {
            "name": name,
            "type": type(module).__name__,
            "finite_inputs": all(bool(each.isfinite().all()) for each in _floats(inputs)),
            "finite_weights": all(bool(each.isfinite().all()) for each in _floats(list(module.parameters()))),
        }


def _note_gradient(row: dict[str, Any], name: str, parameter: Tensor) -> None:
    """Note the first parameter whose gradient is not finite."""
    gradient = parameter.grad
    if row["gradient"] is None and gradient is not None and not dense_part(gradient).isfinite().all():
        row["gradient"] = name


def _floats(values: Any) -> list[Tensor]:
    return [local_part(each.detach()) for each in tensors_in(values) if each.is_floating_point() and each.numel()]
