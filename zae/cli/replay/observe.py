"""The add-on that looks at the steps of a replay: losses, gradients, outputs, and where a NaN begins."""

from __future__ import annotations

import bdb
import contextlib
import math
import pdb
import sys
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the optimizers from the first step on."""
    gone: frozenset[str] = frozenset()
    """Names of the add-ons whose state is not loaded."""
    debugs: bool = False
    raises: bool = False
    """Whether the run itself ends at a loss or a norm that is not finite."""
    added: tuple[str, ...] = ()
    """Names of the add-ons that the run did not have: they begin with their initial state."""
    began: int = 0
    """The step before the first one that was replayed."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class ReplayAddon(AddOnBase):
    """Note what happens in some steps, and end the run after them; it changes nothing but the settings it is given."""

    layer = "observe"
    replay = Replay(0, 0)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Leave out the states of the loggers, which a replay does not have; add those of add-ons that are new."""
        kept = {key: value for key, value in state.items() if key not in self.replay.gone}
        new = [name for name in self.replay.added if name not in kept]
        initial = self.state_dict() if new else {}
        super().load_state_dict({**kept, **{name: initial[name] for name in new if name in initial}}, strict)

    def on_run_begin(self) -> None:
        """Note where the replay begins, and refuse a setting that no optimizer has."""
        super().on_run_begin()
        self.replay.began = self.progress_checker.step
        self._row: dict[str, Any] | None = None
        if self.replay.began >= self.replay.first:
            raise ConfigError(f"the checkpoint has step {self.replay.began}; give one before step {self.replay.first}")
        known = {name for group in self._groups() for name in group if name != "params"}
        for name in self.replay.settings:
            if name not in known:
                raise ConfigError(f"--with {name}=...; {name} is neither an option of the trainer nor a setting of its "
                                  f"optimizers: {', '.join(sorted(known))}")  # fmt: skip

    def on_step_begin(self, batch: Any) -> None:
        """Apply the settings, from the first step on, and let a step that is not finite come to its end."""
        super().on_step_begin(batch)
        is_shown = self.progress_checker.step + 1 >= self.replay.first
        if self.replay.raises:
            self.nonfinite.policy = "warn" if is_shown else "raise"  # A step that comes to its end is in the ledger.
        if is_shown:
            for group in self._groups():
                group.update({name: value for name, value in self.replay.settings.items() if name in group})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers.values() for group in each.param_groups]

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Look at the outputs of all modules and at the gradients as they come, and note the losses."""
        progress = self.progress_checker
        self._row = None
        if not self.replay.first <= progress.step + 1 <= self.replay.last:
            return super().gradients(batch)
        row: dict[str, Any] = {"step": progress.step + 1, "epoch": progress.epoch + 1}
        row |= {"batch": progress.epoch_batch + 1, "outputs": {}, "gradients": {}, "module": None, "gradient": None}
        # Compiled code would be compiled again for the hooks, and might compute other bits.
        is_compiled = hasattr(self, "compile_report")
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

    def may_step(self, outputs: Sequence[StepOutput]) -> bool:
        """Finish the row of the step, and stop in the debugger."""
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
            if self.replay.debugs:
                self._debug(row, outputs)
        return super().may_step(outputs)

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """End the run after the last step."""
        super().on_step_end(outputs)
        if self.progress_checker.step >= self.replay.last:
            self.stop("the replay is over")

    def _debug(self, row: dict[str, Any], outputs: Sequence[StepOutput]) -> None:
        """Stop before the optimizer steps: the gradients are in .grad, and the losses in outputs."""
        sys.stdout.write(
            f"step {row['step']}, before the optimizer steps; see trainer, row, outputs; q ends the replay\n"
        )
        try:
            _stop(self, row, outputs)
        except bdb.BdbQuit:
            self.replay.last = row["step"]
        finally:
            sys.settrace(None)


def _stop(trainer: ReplayAddon, row: dict[str, Any], outputs: Sequence[StepOutput]) -> None:
    pdb.Pdb(nosigint=True).set_trace()
    return  # The debugger stops here, where the arguments are local variables.


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
