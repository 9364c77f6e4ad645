"""Step each parameter in the backward, as soon as its gradient is complete, and free the gradient."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.addon import AddOnBase
from zae.common import optim, random_state
from zae.common.optimizer_modes import has_modes
from zae.common.optimizer_state import copy_optimizer
from zae.common.torch_private import has_step_hooks
from zae.common.walk import has_same_bits, is_sharded
from zae.errors import ConfigError
from zae.optimizers.in_backward import BackwardSteps, name_of, step_alone
from zae.preview.explain import owners_of

__all__ = ["StepInBackwardAddon"]

_SEAMS = (
    "gradients", "micro_step", "sync_context", "backward", "normalize", "unscale", "clip", "gradient_norm", "may_step",
    "optimizer_step", "step_one",
)  # fmt: skip
_OUT = "leave StepInBackwardAddon out"
_SIZE = 4  # Of the parameters with which a step is tried, in each dimension.


class StepInBackwardAddon(AddOnBase):
    """Step each parameter in the backward, as soon as its gradient is complete, and free the gradient: less memory.

    At any time there is the gradient of one parameter, instead of those of all. Weights, states of the optimizers,
    schedules and records are bitwise those without the add-on. Checkpoints are the same as well: a run can resume with
    or without it. With `FSDPAddon`, each rank steps its part of a parameter when it has the average of its gradient.

    It is for a step that needs one gradient at a time. What needs all of them before the first parameter steps is
    refused: clipping by the norm, a float16 loss scale, accumulation, and add-ons or overrides that look at the
    gradients, or compute them again. ``on_nonfinite`` looks at the loss, before the backward.

    An optimizer must step each parameter by its own gradient and state, as those of torch do. Setting up tries that
    with a copy of it: LBFGS, schedule-free optimizers, and those that draw random numbers are refused.

    A backward that fails, for instance as memory runs out, leaves some parameters with a step and others without.
    The error then says so, and no state is saved: resume from the newest checkpoint.

    Raises
    ------
    ConfigError
        An option, an optimizer or an override needs all gradients at once.
    StepError
        ``train_step`` returns several losses; several ranks count targets; or the gradient of a parameter comes twice.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import StepInBackwardAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(250, 1000), [(torch.ones(4, 250), torch.ones(4, 1000))] * 3
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> trainer = PlainTask.add_on(StepInBackwardAddon)(model, "cpu", optimizer=optimizer)
    >>> print(trainer.plan(1, batches).memory)
    2 MB and activations: parameters 1 MB, gradients 1 MB
    >>> trainer.run(1, batches)["step"], model.weight.grad
    (3, None)
    """

    layer = "control"
    process_attributes = {"_backward_steps": None}
    excludes = {
        "GradientAccumulationAddon": "the gradients of several batches are a sum, which is complete with the last of "
        f"them; leave GradientAccumulationAddon out, or {_OUT}",
        "AutoBatchAddon": "the parts of a batch add up to its gradient, which is complete with the last of them; leave "
        f"AutoBatchAddon out, and write a batch size that fits, which zae.find_batch_size finds, or {_OUT}",
        "SilentFaultGuardAddon": f"it compares all gradients before the first parameter steps; {_OUT}",
        "SpikeGuardAddon": "it decides about a step when all gradients are there, and some parameters would have "
        f"stepped; {_OUT}",
        "MultiGPUAddon": "DistributedDataParallel averages gradients in buckets, which hold all of them until the "
        "backward ends; write FSDPAddon instead of MultiGPUAddon",
        "AccelerateAddon": f"it hands the step over to Accelerate, which makes it after the backward; {_OUT}",
        "DeepSpeedAddon": "its engine partitions gradients and makes the step itself; leave StepInBackwardAddon out, "
        "and write zero_stage=2, which frees gradients as well",
        "TensorParallelAddon": "some gradients are summed over the ranks when the backward has ended; write FSDPAddon "
        f"instead of TensorParallelAddon, or {_OUT}",
        "PipelineAddon": f"a pipeline adds up the gradients of its parts of a batch; {_OUT}",
        "LightningAddon": f"the hooks of a LightningModule see all gradients before the step; {_OUT}",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_steps: BackwardSteps | None = None
        precision = getattr(self, "precision", None)
        others = [f"{seam}() of {each.__name__}" for seam in _SEAMS for each in owners_of(type(self), seam)
                  if not each.__module__.startswith("zae.")]  # fmt: skip
        reasons: dict[str, Any] = {
            f"gradient_clip={self.gradient_clip:g} needs the norm of all gradients before the first step; write "
            f"gradient_clip=0, or {_OUT}": self.gradient_clip,
            f"precision='fp16' skips a step in which any gradient overflows, and needs all of them; write "
            f"precision='bf16', or {_OUT}": precision == "fp16",
            f"{' and '.join(others)} may need the gradients, which are freed in the backward; do that work in another "
            f"seam, or {_OUT}": others,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(f"StepInBackwardAddon: {reason}")

    def setup(self) -> None:
        """Refuse what needs all gradients at once."""
        super().setup()
        self._remove()
        if self.mode != "train":
            return
        if getattr(self, "scaler", None) is not None:
            raise ConfigError(
                "StepInBackwardAddon: AMPAddon has chosen fp16, which skips a step if any gradient overflows, and "
                f"needs all of them; write precision='bf16', or {_OUT}"
            )
        if self.world_size > 1 and any(not is_sharded(each) for each in self.parameters if each.requires_grad):
            raise ConfigError(
                "StepInBackwardAddon: the optimizers hold parameters outside of the sharded model, whose gradients are "
                f"averaged when the backward has ended; {_OUT}"
            )
        for each in getattr(self, "callbacks", ()):
            method = getattr(type(each), "on_pre_optimizer_step", None)
            if method is not None and not method.__module__.startswith("transformers."):
                raise ConfigError(
                    f"StepInBackwardAddon: on_pre_optimizer_step of {type(each).__name__} sees the gradients before "
                    f"the step, and they are freed in the backward; leave the callback out, or {_OUT}"
                )
        for name, optimizer in self.optimizers.items():
            _check(name, optimizer)
        named = self.unwrap().named_parameters
        self._backward_steps = BackwardSteps(
            self.optimizers, self.optimization.step_one, lambda parameter: name_of(parameter, named())
        )

    def teardown(self) -> None:
        """Remove the hooks of the parameters."""
        self._remove()
        super().teardown()

    def _remove(self) -> None:
        if self._backward_steps is not None:
            self._backward_steps.remove()
        self._backward_steps = None

    # ------------------------------------------------------------------------------------------------------- a step

    def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
        """Refuse to count targets over ranks, by which gradients are divided."""
        if num_targets is not None and self.data_size > 1:
            raise ConfigError(
                "StepInBackwardAddon: train_step returned 'num_targets', by whose sum over the ranks the gradients are "
                f"divided when the backward has ended; return the loss alone, or {_OUT}"
            )
        return super().scale_loss(loss, num_targets, count)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Step each parameter when its gradient is complete, and free that."""
        if isinstance(loss, Mapping) and len(loss) > 1:
            raise ConfigError(
                f"StepInBackwardAddon: train_step returned {len(loss)} losses, and the backward of one would change "
                f"weights that the next one needs; return their sum where each parameter is in one of them, or {_OUT}"
            )
        if kwargs.get("retain_graph") or kwargs.get("create_graph"):
            raise ConfigError(
                "StepInBackwardAddon: backward() was given retain_graph or create_graph, and a second backward would "
                f"need the weights of before the step; {_OUT}"
            )
        if self.nonfinite.keeps_from_stepping(loss, self):
            return  # `may_step` raises, or skips the step.
        assert self._backward_steps is not None
        with self._backward_steps.in_backward():
            super().backward(loss, **kwargs)

    def optimizer_step(self) -> bool:
        """Step what the backward has left."""
        stepped = super().optimizer_step()
        if self._backward_steps is not None:
            self._backward_steps.finish()
        return stepped

    @property
    def _is_half_stepped(self) -> bool:
        """Whether some parameters have made a step that others have not."""
        return self._backward_steps is not None and self._backward_steps.has_begun

    @property
    def can_save_alone(self) -> bool:  # type: ignore[override]
        """False also while some parameters have made a step that others have not."""
        return super().can_save_alone and not self._is_half_stepped

    @contextmanager
    def watch_gradients(self, watch: Callable[[Tensor], None]) -> Iterator[None]:
        """Call a function with each parameter of the block's backward, while its gradient is there.

        Parameters
        ----------
        watch : callable
            Takes the parameter; it must not change it.
        """
        assert self._backward_steps is not None
        self._backward_steps.watch = watch
        try:
            yield
        finally:
            self._backward_steps.watch = None

    def on_exception(self, error: BaseException) -> None:
        """Say that the weights are those of no step."""
        if self._is_half_stepped:
            error.add_note(
                "zae: the backward had stepped some parameters (StepInBackwardAddon): the weights are neither those "
                "before nor those after this step; resume from a checkpoint"
            )
        super().on_exception(error)

    # ------------------------------------------------------------------------------------------------ what is shown

    def plan_lines(self, plan: Any) -> list[str]:
        """Say how parameters step."""
        return [*super().plan_lines(plan), "each parameter steps in the backward, when its gradient is complete"]

    def plan_memory(self, plan: Any) -> None:
        """Count the largest gradient alone."""
        super().plan_memory(plan)
        plan.memory.frees_gradients = True


def _check(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose parameters do not step each by its own gradient and state."""
    kind = type(optimizer).__name__
    reason = ""
    if has_modes(optimizer):
        reason = "it counts and averages over the steps of all parameters"
    elif has_step_hooks(optimizer):
        reason = "hooks are registered for its step, which is that of all parameters"
    elif not optim.is_stepped_by_class(optimizer):
        reason = "its step() was replaced"
    else:
        reason = _try_alone(optimizer)
    if reason:
        raise ConfigError(f"StepInBackwardAddon: optimizer {name} ({kind}) cannot step one parameter at a time: "
                          f"{reason}; {_OUT}")  # fmt: skip


def _try_alone(optimizer: Optimizer) -> str:
    """Step copies with small parameters together and one by one; return why that differs, or nothing."""
    try:
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            together, alone = _small_copy(optimizer), _small_copy(optimizer)
            for _ in range(3):
                torch.manual_seed(0)
                _give_gradients(together)
                type(optimizer).step(together)
                torch.manual_seed(0)
                _give_gradients(alone)
                for index, group in reversed([*enumerate(alone.param_groups)]):
                    for parameter in reversed(group["params"]):  # As in a backward.
                        step_alone(alone, index, parameter, type(optimizer).step)
                        parameter.grad = None
                type(optimizer).step(alone)  # Without any gradient: what is left after a backward.
    except Exception as error:
        return f"a step of a copy has raised {type(error).__name__}: {error}"
    if not has_same_bits(_contents(together), _contents(alone)):
        return "the step of one depends on those of others, or on random numbers that it draws"
    return ""


def _small_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer without its state, with few and small parameters of each group."""
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for parameter in optim.parameters_of(optimizer):
        shape = () if nn.parameter.is_lazy(parameter) else tuple(min(_SIZE, size) for size in parameter.shape)
        small = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        memo[id(parameter)] = nn.Parameter(small, parameter.requires_grad)
    twin = copy_optimizer(optimizer, memo)
    for group in twin.param_groups:
        kinds = {(each.dim(), each.dtype): each for each in reversed(group["params"])}
        group["params"] = list({id(each): each for each in (*group["params"][:2], *kinds.values())}.values())
    return twin


def _give_gradients(optimizer: Optimizer) -> None:
    drawn = torch.Generator().manual_seed(1)
    for parameter in optim.parameters_of(optimizer):
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=drawn)
            parameter.grad = values.to(parameter.device, parameter.dtype)


def _contents(optimizer: Optimizer) -> list[Any]:
    """Return what a step may change."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    parameters = optim.parameters_of(optimizer)
    return [groups, *((each.detach(), dict(optimizer.state.get(each, {}))) for each in parameters)]
