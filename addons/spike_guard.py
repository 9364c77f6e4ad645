"""Skip steps whose loss or gradient norm is far above the recent ones."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import torch

from zae.addon import AddOnBase, Description
from zae.arguments import Count, Interval, check_argument
from zae.errors import ConfigError, did_you_mean
from zae.loop.step_output import StepOutput

__all__ = ["SpikeGuardAddon"]

_log = logging.getLogger("zae")
_WATCHED = ("loss", "grad_norm")
_Threshold: TypeAlias = Annotated[float, Interval("[0.1, inf)")]
_SIGMA = 1.4826  # The standard deviation of a normal distribution, in median absolute deviations.
_LEAST = 0.01  # Of the median: the smallest deviation that is taken for one.


class SpikeGuardAddon(AddOnBase):
    """Skip a step whose loss or gradient norm is far above the recent ones.

    Before the optimizer steps, the loss of the step (the mean over its batches and ranks) and the norm of its gradients
    before clipping are compared with those of the last steps that were taken. The score is ``(value - median) / (1.4826
    * MAD)``, where MAD is the median absolute deviation, and the denominator is at least 1 % of the median. All ranks
    decide the same.

    The optimizer does not step: the step counts as skipped. A run that is killed and resumed repeats the decision.

    Each spike is in ``spikes``, in the log (``spike/loss``, ``spike/grad_norm``, ``spike/score``), and a warning.

    Parameters
    ----------
    spike_threshold : float, or dict of str to float
        The score above which a value is a spike; ``{"loss": 8.0}`` watches the loss alone, ``{"loss": 8.0, "grad_norm":
        20.0}`` both.
    spike_window : int
        How many of the last values are compared with.
    spike_warmup : int
        How many values there must be before one can be a spike.
    max_spikes : int
        The run is stopped after so many spikes one after the other: the level has changed, or the weights are lost.

    Attributes
    ----------
    spikes : list of dict
        ``step``, ``batch`` (the last one of the step), ``loss``, ``grad_norm``, ``score`` and ``of`` (which of both).

    Raises
    ------
    ConfigError
        An option has an invalid value.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import SpikeGuardAddon
    >>> from zae.testing import PlainTask
    >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 8
    >>> batches[6] = (torch.ones(4, 2), torch.full((4, 1), 1e4))
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> trainer = PlainTask.add_on(SpikeGuardAddon)(model, "cpu", optimizer=optimizer, spike_warmup=4)
    >>> metrics = trainer.run(1, batches)
    >>> trainer.progress_checker.skipped_steps, trainer.spikes[0]["step"]
    (1, 7)
    """

    layer = "control"
    state_attributes = ("spikes", "_losses", "_norms", "_in_a_row")
    _spike: dict[str, Any] | None

    replicated_options = {
        "spike_threshold": "should_step",
        "spike_window": "should_step",
        "spike_warmup": "should_step",
        "max_spikes": "should_step",
    }

    def __init__(
        self,
        *args: Any,
        spike_threshold: float | Mapping[str, float] = 10.0,
        spike_window: Annotated[int, Interval("[4, inf)")] = 128,
        spike_warmup: Annotated[int, Interval("[3, inf)")] = 32,
        max_spikes: Count = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.spike_threshold = _check_thresholds(spike_threshold)
        self.spike_window = spike_window
        self.spike_warmup = spike_warmup
        if self.spike_warmup > self.spike_window:
            raise ConfigError(
                f"spike_warmup={spike_warmup} is more than spike_window={spike_window}: no value would "
                "be compared; write a smaller one"
            )
        self.max_spikes = max_spikes
        self.spikes: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._in_a_row = 0
        self._spike = None  # The spike of the present step.

    # -------------------------------------------------------------------------------------------------- the decision

    def setup(self) -> None:
        """Keep the buffers of each step, where a loss that is not finite comes here."""
        super().setup()
        self.nonfinite.keeps_buffers = self.nonfinite.policy == "warn"

    def should_step(self, outputs: Sequence[StepOutput]) -> bool:
        """Leave the step out if its loss or its gradient norm is a spike."""
        should_step = super().should_step(outputs)
        loss = self._mean_loss(outputs)
        norm = float(self._norm_before_clip())
        scores = {
            "loss": _score(loss, self._losses, self.spike_warmup),
            "grad_norm": _score(norm, self._norms, self.spike_warmup),
        }
        # An overflow in float16, which the loss scale answers, or a loss that is not finite.
        if not math.isfinite(norm):
            scores["grad_norm"] = 0.0
        over = [name for name, limit in self.spike_threshold.items() if scores[name] > limit]
        if over:
            name_of_spike = max(over, key=lambda name: scores[name] / self.spike_threshold[name])
            self._spike = {"loss": loss, "grad_norm": norm, "score": scores[name_of_spike], "of": name_of_spike}
            if not math.isfinite(loss) and self.nonfinite.keeps_buffers:
                self.nonfinite.restore_buffers()
            return False
        if should_step and math.isfinite(norm) and math.isfinite(loss):
            self._losses = [*self._losses, loss][-self.spike_window :]
            self._norms = [*self._norms, norm][-self.spike_window :]
            self._in_a_row = 0
        return should_step

    def _mean_loss(self, outputs: Sequence[StepOutput]) -> float:
        """Return the mean loss of a step over its batches and ranks; of several losses, their sum."""
        total = 0.0
        for output in outputs:
            losses = output.loss.values() if isinstance(output.loss, Mapping) else (output.loss,)
            total += sum(float(loss.detach()) for loss in losses)
        if self.world_size == 1:
            return total / len(outputs)
        sums = self.reduce(torch.tensor([total, len(outputs)], dtype=torch.float64, device=self.device))
        return float(sums[0] / sums[1])

    def _norm_before_clip(self) -> Any:
        """Return the norm of the gradients before they were clipped."""
        norm = self.optimization.grad_norm
        return self.engine.gradient_norm(self.optimization.parameters) if norm is None else norm

    # ------------------------------------------------------------------------------------------------ what follows

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Note the spike, and stop where there are many."""
        super().on_step_end(outputs)
        spike = self._spike
        self._spike = None
        if spike is None:
            return
        progress = self.progress_checker
        count = self._in_a_row + 1
        spike = {"step": progress.step, "batch": progress.batch, **spike}
        self.spikes = [*self.spikes, spike]
        self._in_a_row = count
        self.log({f"spike/{name}": spike[name] for name in (*_WATCHED, "score")}, progress.step)
        if self.is_main:
            _log.warning(
                "step %d: the %s of %g is a spike, with a score of %.3g (threshold %g). "
                "The step was skipped; %d so far",
                progress.step,
                "gradient norm" if spike["of"] == "grad_norm" else "loss",
                spike[spike["of"]],
                spike["score"],
                self.spike_threshold[spike["of"]],
                len(self.spikes),
            )
        if count >= self.max_spikes:
            self.stop(f"{count} spikes one after the other (max_spikes={self.max_spikes})")

    def describe(self) -> list[Description]:
        """Tell which steps are left out."""
        limits = ", ".join(f"{name} {limit:g}" for name, limit in self.spike_threshold.items())
        return [*super().describe(), Description("spikes are skipped", f"scores above {limits}", where="should_step")]


def _check_thresholds(argument: Any) -> dict[str, float]:
    """Return the thresholds by what is watched."""
    thresholds = dict(argument) if isinstance(argument, Mapping) else dict.fromkeys(_WATCHED, argument)
    for name in thresholds:
        if name not in _WATCHED:
            raise ConfigError(
                f"spike_threshold has {name!r}; it may have 'loss' and 'grad_norm'{did_you_mean(str(name), _WATCHED)}"
            )
    if not thresholds:
        raise ConfigError("spike_threshold={} watches nothing; write {'loss': 10.0}, or leave the add-on out")
    return {name: check_argument("spike_threshold", value, _Threshold) for name, value in thresholds.items()}


def _score(value: float, known: list[float], least: int) -> float:
    """Return by how many deviations a value is above the known ones; 0 for the first values."""
    if not math.isfinite(value):
        return math.inf
    if len(known) < least:
        return 0.0
    median = statistics.median(known)
    deviation = _SIGMA * statistics.median(abs(loss - median) for loss in known)
    return (value - median) / max(deviation, _LEAST * abs(median), 1e-30)
