"""The guard against losses and gradients that are NaN or infinite: looked at before the optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zae.errors import ConfigError, NonFiniteError, did_you_mean

if TYPE_CHECKING:
    from zae.loop.step_output import StepOutput
    from zae.trainer import Trainer

__all__ = ["LATEST", "NonFiniteGuard", "bad_parameters"]

_log = logging.getLogger("zae")
_POLICIES = ("raise", "skip", "warn")

LATEST = 64
"""On an accelerator, after how many steps at most a loss has been looked at."""


class NonFiniteGuard:
    """Looks at each loss, and at the gradient norm where clipping computes it, before the optimizer steps.

    On the CPU, and with "skip" everywhere, it looks before each step. On an accelerator, where a look makes the host
    wait for the device, "raise" and "warn" look at the last `LATEST` steps at once, and always before a state is read:
    the error comes late there, and a checkpoint is never of weights that a bad step has moved.

    Parameters
    ----------
    policy : {"raise", "skip", "warn"}
        Raise `NonFiniteError`, leave the step out, or take it all the same.

    Attributes
    ----------
    scaled : bool
        Whether a loss scale is in use, for which an overflowing gradient is not an error.

    Raises
    ------
    ConfigError
        The policy is another one.

    Examples
    --------
    >>> NonFiniteGuard("raise").policy
    'raise'
    """

    def __init__(self, policy: str) -> None:
        if policy not in _POLICIES:
            raise ConfigError(
                f"on_nonfinite={policy!r}; it must be 'raise', 'skip' or 'warn'{did_you_mean(str(policy), _POLICIES)}"
            )
        self.policy = policy
        self.scaled = False
        self._waiting: list[Tensor] = []
        self._steps: list[int] = []
        self._unreported: list[int] = []  # With "warn" on several ranks: the steps that this one alone may have found.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": [], "_steps": [], "_unreported": []}

    def may_step(self, trainer: Trainer, outputs: Sequence[StepOutput]) -> bool:
        """Say whether the optimizer may step.

        Parameters
        ----------
        trainer : Trainer
            Its gradients are those of the step.
        outputs : sequence of StepOutput
            What the steps of the window returned.

        Returns
        -------
        bool
            False only with "skip".

        Raises
        ------
        NonFiniteError
            With "raise": nothing has been stepped.
        """
        bad = False
        for values, _ in outputs:
            loss = values["loss"]
            if type(loss) is Tensor and loss.is_cpu:
                value = loss.item()
                if value - value:  # Of NaN and of the infinities this is NaN.
                    bad = True
            else:
                bad = self._look(trainer, loss) or bad
        norm = trainer.optimization.grad_norm
        if norm is not None and not self.scaled:
            if norm.is_cpu:
                value = norm.item()
                if value - value:
                    bad = True
            else:
                bad = self._look(trainer, norm) or bad
        own = bad
        if self.policy == "skip" and trainer.world_size > 1:
            # One rank's NaN is in every rank's gradients, but not in its loss: all skip, or the ranks part.
            bad = float(trainer.reduce(torch.tensor(float(bad), device=trainer.device))) > 0
        if bad:
            return self._found(trainer, outputs, own)
        if self._waiting and len(self._waiting) >= LATEST:
            self.read_pending(trainer)
        return True

    def read_pending(self, trainer: Trainer) -> None:
        """Look at the steps that wait on an accelerator."""
        waiting, steps, self._waiting, self._steps = self._waiting, self._steps, [], []
        if not waiting:
            return
        values = torch.stack([value.float() for value in waiting]).tolist()
        bad = [(step, value) for step, value in zip(steps, values) if not math.isfinite(value)]
        if not bad:
            return
        found = list(dict.fromkeys(step for step, _ in bad))
        trainer.progress_checker.nonfinite_steps += len(found)
        self._unreported += found if trainer.world_size > 1 else []
        step, value = bad[0]
        text = (
            f"the loss or the gradient norm of step {step} was {value} (seen after step "
            f"{trainer.progress_checker.step}: on {trainer.device.type} it is read every {LATEST} steps, and before "
            f"anything is saved); {_rates(trainer)}"
        )
        if self.policy == "raise":
            raise NonFiniteError(
                f"{text}. The weights have moved since; go on from the newest checkpoint, which is of before step "
                f"{step}. {_CURE}"
            )
        _log.warning("%s; %d such steps were taken", text, trainer.progress_checker.nonfinite_steps)

    def sync_counts(self, trainer: Trainer) -> None:
        """Count on every rank the steps that another one has taken all the same; all ranks call it.

        Parameters
        ----------
        trainer : Trainer
            Between two steps; a loss is looked at where it is computed, and nobody waits for the others there.
        """
        self.read_pending(trainer)
        if self.policy == "warn" and trainer.world_size > 1:
            own, self._unreported = self._unreported, []
            everywhere = {step for steps in trainer.gather(own) for step in steps}
            trainer.progress_checker.nonfinite_steps += len(everywhere.difference(own))

    def _look(self, trainer: Trainer, value: Any) -> bool:
        """Look at one loss, at several, or at a norm; one on an accelerator is put off where that may be."""
        if isinstance(value, Mapping):
            return sum([self._look(trainer, each) for each in value.values()]) > 0  # Each is looked at.
        if value.is_cpu or self.policy == "skip":
            return not math.isfinite(value.item())
        self._waiting.append(value.detach().reshape(()))
        self._steps.append(trainer.progress_checker.step + 1)
        return False

    def _found(self, trainer: Trainer, outputs: Sequence[StepOutput], own: bool) -> bool:
        """Do what the policy says about a step that is not finite."""
        progress = trainer.progress_checker
        where = f"step {progress.step + 1} (epoch {progress.epoch + 1}, batch {progress.epoch_batch + 1}"
        where += f" to {progress.epoch_batch + len(outputs)})" if len(outputs) > 1 else ")"
        found = "; ".join(_shown(out) for out, _ in outputs)
        norm = "" if trainer.grad_norm is None else f", gradient norm {float(trainer.grad_norm):g}"
        who = "" if own else " on another rank (here"
        text = f"{where} is not finite{who}: {found}{norm}{'' if own else ')'}; {_rates(trainer)}"
        if self.policy == "raise":
            raise NonFiniteError(f"{text}. The optimizer did not step: the weights are those after step "
                                 f"{progress.step}. {_CURE}")  # fmt: skip
        progress.nonfinite_steps += 1
        if self.policy == "warn" and trainer.world_size > 1:
            self._unreported.append(progress.step + 1)
        if progress.nonfinite_steps & (progress.nonfinite_steps - 1) == 0:  # The 1st, 2nd, 4th, 8th: not a flood.
            done = "left out" if self.policy == "skip" else "taken all the same"
            _log.warning("%s. The step was %s; %d so far", text, done, progress.nonfinite_steps)
        return self.policy != "skip"


_CURE = (
    "Look for a division by 0, a log of 0 or a bad sample (torch.autograd.set_detect_anomaly(True) names the "
    "operation), lower the learning rate, or clip with gradient_clip=1.0; on_nonfinite='skip' skips such steps"
)


def bad_parameters(named: Mapping[str, Tensor]) -> list[str]:
    """Name the parameters that hold NaN or an infinity; a device is waited for once."""
    floats = {key: value.detach() for key, value in named.items() if value.is_floating_point() and value.numel()}
    if not floats:
        return []
    # A sum is one fast pass; that it is finite proves that all are. Only else each number is looked at.
    sums = {key: _sum(value) for key, value in floats.items()}
    away = [key for key, total in sums.items() if isinstance(total, Tensor)]
    if away:
        sums.update(zip(away, torch.stack([sums[key].float() for key in away]).tolist()))
    suspects = [key for key, total in sums.items() if not math.isfinite(total)]
    return [key for key in suspects if not bool(floats[key].isfinite().all())]


def _sum(value: Tensor) -> Any:
    """A sum: by NumPy on the host, where the threads of torch would have to meet for each tensor of a busy machine."""
    if value.is_cpu and value.dtype in (torch.float32, torch.float64) and value.is_contiguous():
        with np.errstate(all="ignore"):
            return float(np.add.reduce(value.numpy(), axis=None))
    return value.sum()


def _shown(out: Mapping[str, Any]) -> str:
    """The numbers that a step returned."""
    parts = []
    for key, value in out.items():
        if isinstance(value, Mapping):
            parts.append(f"{key} ({_shown(value)})")
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            parts.append(f"{key} {float(value.detach() if isinstance(value, Tensor) else value):g}")
    return ", ".join(parts)


def _rates(trainer: Trainer) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in trainer.optimization.learning_rates().items())
