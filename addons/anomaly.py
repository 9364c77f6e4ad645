"""Name the module and the operation in which a number first becomes NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from zae.addon import AddOnBase, Description
from zae.arguments import Count, Interval, check_argument
from zae.errors import ConfigError, NonFiniteError
from zae.loop.step_output import StepOutput, loss_numbers
from zae.model.weights import named_parameters
from zae.null_context import NULL_CONTEXT
from zae.torch_private import is_compiled_by_hand
from zae.values.walk import dense_part, local_part, tensors_in

__all__ = ["AnomalyAddon"]

_log = logging.getLogger("zae")
_OF_BACKWARD = "returned nan values"
"""What torch's error of a backward contains."""


class AnomalyAddon(AddOnBase):
    """Name the module and the operation in which a number of a step first becomes NaN or infinite.

    It looks at the output of each module, at the loss, and at each gradient; torch's anomaly mode names the operation
    whose derivative is NaN. With ``on_nonfinite="raise"`` the run ends with NonFiniteError before the optimizer steps.
    With "skip" and "warn", and with the loss scale of float16, whose overflows are no errors, a warning names the
    module, and training continues. An infinity that does not reach the loss, in a mask for instance, is not an error.
    Weights are bitwise the same with and without the add-on.

    A step takes twice as long, a short one more, and on an accelerator the host waits for each module.

    Parameters
    ----------
    anomaly_steps : (int, int), optional
        The first and the last optimizer step that is watched, counted from 1; by default all.

    Raises
    ------
    ConfigError
        The steps are not a range, or the model is compiled.
    NonFiniteError
        In ``run``: a number is not finite.

    Examples
    --------
    >>> import torch
    >>> from zae import NonFiniteError
    >>> from zae.addons import AnomalyAddon
    >>> from zae.testing import PlainTask
    >>> class Root(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x.sqrt()
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), Root(), torch.nn.Linear(4, 1))
    >>> trainer = PlainTask.add_on(AnomalyAddon)(model, "cpu", optimizer=torch.optim.SGD, log_bar=False)
    >>> try:
    ...     trainer.run(1, [(torch.randn(64, 2), torch.ones(64, 1))])
    ... except NonFiniteError as error:
    ...     print(str(error).split("; ")[1])
    the first NaN of the forward is in the output of '1' (Root)
    """

    layer = "observe"
    process_attributes = {"_anomaly": None}
    excludes = {
        "compiles_model": "compiled code has no modules and operations to look at; leave CompileAddon out until the "
        "cause is found",
    }

    def __init__(self, *args: Any, anomaly_steps: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        steps: Any = (1, math.inf) if anomaly_steps is None else anomaly_steps
        if anomaly_steps is not None:
            if not isinstance(steps, (tuple, list)) or len(steps) != 2:
                raise ConfigError(f"anomaly_steps={steps!r}; write (first, last), for instance (800, 820)")
            first = check_argument("the first of anomaly_steps", steps[0], Count)
            after = Annotated[int, Interval(f"[{first}, inf)")]
            steps = first, check_argument("the last of anomaly_steps", steps[1], after)
        self.anomaly_steps: tuple[float, float] = steps
        self._anomaly: _NonFiniteValues | None = None
        if any(map(is_compiled_by_hand, (self.model, *self.unwrap().modules()))):
            raise ConfigError(
                "the model is compiled, and compiled code has no modules that AnomalyAddon could look at; give the "
                "model without torch.compile"
            )

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Watch the forward and the backward of the step."""
        self._anomaly = None
        if not self.anomaly_steps[0] <= self.progress_checker.step + 1 <= self.anomaly_steps[1]:
            return super().gradients(batch)
        values = _NonFiniteValues(self.unwrap())
        self._anomaly = values
        try:
            with values.watching(), self._naming_operations():
                return super().gradients(batch)
        except RuntimeError as error:
            if _OF_BACKWARD not in str(error):
                raise
            text = str(error).rstrip(".")
            raise self._error(f"in the backward, {text} (a warning shows its line); {values}") from error

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Look at the loss first: the backward of a NaN says nothing of where it comes from."""
        anomaly = self._anomaly
        numbers = loss_numbers(loss)
        values = [*numbers.values()] if isinstance(numbers, dict) else [numbers]
        if anomaly is not None and self._ends_run and not all(map(math.isfinite, values)):
            raise self._error(f"the loss is {numbers}; {anomaly}")
        super().backward(loss, **kwargs)

    def should_step(self, outputs: Sequence[StepOutput]) -> bool:
        """Say where a step that is not finite became so; refuse one of which only a gradient is not."""
        anomaly = self._anomaly
        self._anomaly = None
        before = self.progress_checker.nonfinite_steps
        try:
            may = super().should_step(outputs)
        except NonFiniteError as error:
            if anomaly is not None:
                error.add_note(f"zae: {anomaly}")
            raise
        if anomaly is not None and (anomaly.gradient or self.progress_checker.nonfinite_steps > before):
            if self._ends_run:
                raise self._error(str(anomaly))
            _log.warning("step %d: %s", self.progress_checker.step + 1, anomaly)
        return may

    def describe(self) -> list[Description]:
        """Tell which steps are watched."""
        first, last = self.anomaly_steps
        steps = "every step" if (first, last) == (1, math.inf) else f"steps {first} to {last}"
        watched = f"{steps}, which makes them slower"
        return [*super().describe(), Description("AnomalyAddon watches", watched, where="gradients")]

    @property
    def _ends_run(self) -> bool:
        return self.nonfinite.policy == "raise" and not self.precision_part.is_scaled

    def _naming_operations(self) -> AbstractContextManager[Any]:
        """Let torch raise an error at a derivative that is NaN, where that ends the run."""
        return torch.autograd.set_detect_anomaly(True) if self._ends_run else NULL_CONTEXT

    def _error(self, finding: str) -> NonFiniteError:
        progress = self.progress_checker
        batch = progress.epoch_batch + 1 + self.current_run.activity.micro_index
        return NonFiniteError(
            f"step {progress.step + 1} (epoch {progress.epoch + 1}, batch {batch}) is not finite: {finding}. The "
            f"optimizer did not step: the weights are those after step {progress.step}"
        )


class _NonFiniteValues:
    """What of a step is not finite, each in the order in which it was computed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._outputs: dict[str, str] = {}
        self.gradient = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what the modules return, and at the gradients of the parameters."""
        hooks = [
            module.register_forward_hook(partial(self._look, name)) for name, module in self._model.named_modules()
        ]
        for name, parameter in named_parameters(self._model).items():
            if parameter.requires_grad and parameter.is_leaf:
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._look_at_gradient, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note the first NaN and the first infinity; inner modules return before those around them."""
        for value in _floats(output):
            if bool(value.isfinite().all()):
                continue
            kind = "NaN" if bool(value.isnan().any()) else "infinity"
            bad = int((~value.isfinite()).sum())
            inner = _are_finite(inputs)
            owner = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            weights = _are_finite([*module.parameters(recurse=False)])
            text = (
                f"the first {kind} of the forward is in the output of {owner}; {bad} of {value.numel()} values, its "
                f"inputs {inner}, its weights {weights}"
            )
            self._outputs.setdefault(kind, text)

    def _look_at_gradient(self, name: str, parameter: Tensor) -> None:
        """Note the first parameter whose gradient is not finite."""
        gradient = parameter.grad
        if not self.gradient and gradient is not None and not bool(dense_part(gradient).isfinite().all()):
            self.gradient = name

    def __str__(self) -> str:
        if self._outputs:
            return "; ".join(self._outputs.values())
        gradient = f"; the first gradient that is not finite is that of {self.gradient!r}" if self.gradient else ""
        return f"the outputs of all modules are finite{gradient}"


def _floats(values: Any) -> list[Tensor]:
    """Return the tensors of numbers with a point; those in 8 bits have no operations that look at them."""
    tensors = [local_part(tensor.detach()) for tensor in tensors_in(values)]
    return [
        tensor
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1
    ]


def _are_finite(values: Any) -> str:
    return "are finite" if all(bool(value.isfinite().all()) for value in _floats(values)) else "are not"
