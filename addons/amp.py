"""Mixed precision: autocast for the forward, a loss scale for fp16, and weights in bfloat16."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from zae.addon import AddOnBase, Description, replaces
from zae.device import cpu_computes_in_bf16
from zae.errors import CheckpointMismatch, ConfigError, did_you_mean
from zae.null_context import NULL_CONTEXT, both
from zae.optim import parameters_of
from zae.optim.checks import needs_closure
from zae.parts import Precision
from zae.torch_private import found_overflow, overflow_flags

__all__ = ["AMPAddon", "MixedPrecision"]

_log = logging.getLogger("zae")
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
# Batch statistics would be rounded away in bfloat16, and the CPU refuses a norm of another type than its input.
# Behind a parametrization are the parameters of which a weight is computed, some with buffers in float32.
_IN_FLOAT32 = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    ParametrizationList,
)
_OF_LIGHTNING = {
    "bf16-true": "; write dtype='bf16'",
    "bf16-mixed": "; write precision='bf16'",
    "16-true": "; write precision='fp16', which keeps the weights in float32",
    "16-mixed": "; write precision='fp16'",
    "32-true": "; write precision='fp32'",
}


class MixedPrecision(Precision):
    """Autocast in bfloat16 or float16, and for float16 a scale of the loss (torch's GradScaler).

    Parameters
    ----------
    name : {"fp32", "bf16", "fp16"}
        The type of the forward; it may be set until `begin`.
    loss_scale : (float, float)
        The initial and the smallest scale.
    """

    def __init__(self, name: str = "fp32", loss_scale: tuple[float, float] = (65536.0, 1.0)) -> None:
        super().__init__(name)
        self.loss_scale = loss_scale
        self.scaler = cast("torch.amp.GradScaler | None", None)
        self.is_unscaled = False  # Whether gradients were divided by the scale that have not been stepped yet.
        self._device = "cpu"
        self._stepped = False
        self._state: dict[str, Any] = {}  # Of the scaler, between two runs.
        self._handles: list[Any] = []

    def begin(self, device: str, optimizers: Iterable[Optimizer]) -> None:
        """Begin a run on a type of device, which steps these optimizers."""
        self._device = device
        if self.name != "fp16":
            return
        scaler = torch.amp.GradScaler(device, init_scale=self.loss_scale[0])
        if self._state:
            scaler.load_state_dict(self._state)
        self.scaler = scaler
        self.is_scaled = True
        self._handles = [optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers]

    def end(self) -> None:
        """End a run, and keep the state of its scale."""
        self._state = self.state_dict()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.scaler = None
        self.is_scaled = False
        self.is_unscaled = False

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast the forward; in float32, leave it."""
        dtype = _TYPES[self.name]
        return NULL_CONTEXT if dtype is None else torch.autocast(self._device, dtype=dtype)

    def scale(self, loss: Any) -> Any:
        """Multiply a loss, or each of several, by the scale."""
        scaler = self.scaler
        if scaler is None:
            return loss
        if isinstance(loss, Mapping):
            return {key: scaler.scale(part) for key, part in loss.items()}
        return scaler.scale(loss) if isinstance(loss, Tensor) else loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients by the scale."""
        if self.scaler is not None:
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
            self.is_unscaled = True

    def found_inf(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the tensors in which the scaler has noted an overflow."""
        return [] if self.scaler is None else overflow_flags(self.scaler, optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step an optimizer, unless its gradients overflowed."""
        if self.scaler is None:
            return super().step(optimizer)
        # torch calls a fused optimizer after an overflow too. It then allocates its state without writing it, so that a
        # first momentum would be uninitialized memory.
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        is_fused = is_fused or getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and found_overflow(self.scaler, optimizer):
            return False
        self._stepped = False
        self.scaler.step(optimizer)
        return self._stepped

    def update(self) -> None:
        """Halve the scale after an overflow, and double it after many steps without one."""
        self.is_unscaled = False
        if self.scaler is not None:
            self.scaler.update()

    def keep_scale_up(self) -> bool:
        """Put a scale that has become too small back to the smallest one; return whether it was."""
        if self.scaler is None or self.scaler.get_scale() >= self.loss_scale[1]:
            return False
        self.scaler.update(self.loss_scale[1])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; the last one while there is no scaler."""
        return self._state if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a state of the scaler."""
        self._state = dict(state)
        if self.scaler is not None and state:
            self.scaler.load_state_dict(self._state)

    def _note_step(self, *_: Any) -> None:
        """Note that the optimizer stepped; comparing the scale instead would wait for the device."""
        self._stepped = True


class AMPAddon(AddOnBase):
    """Compute forward passes in bfloat16 or float16; gradients are unscaled before they are clipped.

    A float16 step whose gradients overflow is skipped: parameters, optimizer, schedulers and averages do not change,
    the loss scale is halved, and ``progress_checker`` counts the step in ``skipped_steps`` and in ``step``.

    Parameters
    ----------
    precision : {"auto", "bf16", "fp16", "fp32"} or list of them
        "auto" is ``["bf16", "fp16"]``. From a list, the first with native support on the device is used, else "fp32",
        which changes nothing. A CPU supports bf16 with AVX512_BF16, AMX or Arm's instructions for it; on others an
        explicit "bf16" is emulated, much slower than "fp32", with a warning.
    loss_scale : (float, float)
        For fp16, the initial and the smallest scale. It doubles after 2000 steps without an overflow
        (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).
    dtype : {"bf16", "fp32"} or torch.dtype, optional
        "bf16" converts the parameters of the model to bfloat16 when the trainer is made. ``BatchNorm``,
        ``InstanceNorm``, ``LayerNorm``, ``GroupNorm`` and parametrizations are in float32, and other buffers keep their
        types. ``precision`` is then "bf16". The optimizer steps these weights, so that steps smaller than 1/256 of a
        weight are lost, unless it rounds at random. By default, and with "fp32", the model stays as it is.

    Raises
    ------
    ConfigError
        A precision or a type is unknown, the scales are not valid, or weights in bfloat16 cannot be trained in this
        composition.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import AMPAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         output = self.model(batch)
    ...         self.seen = output.dtype
    ...         return {"loss": output.float().square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(AMPAddon)(model, "cpu", optimizer=optimizer, precision="bf16")
    >>> _ = trainer.run(1, [torch.ones(8, 2)])
    >>> trainer.seen
    torch.bfloat16
    """

    layer = "precision"
    slot = "precision"
    precision_part: MixedPrecision
    state_attributes = ("_scaler",)
    _wanted: list[Any]
    _asked_for_one: bool

    replicated_options = {
        "precision": "forward_context",
        "loss_scale": "scale_loss",
        "dtype": "setup",
    }

    def __init__(
        self,
        *args: Any,
        precision: str | Sequence[str] = "auto",
        loss_scale: tuple[float, float] = (65536.0, 1.0),
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        listed = ["bf16", "fp16"] if precision == "auto" else precision
        wanted: list[Any] = list(listed) if isinstance(listed, (list, tuple)) else [listed]
        for name in wanted:
            if not isinstance(name, str) or name not in _TYPES:
                raise ConfigError(
                    f"precision={precision!r}; it must be 'auto', 'bf16', 'fp16', 'fp32' or a list of them"
                    + (_OF_LIGHTNING.get(str(name)) or did_you_mean(str(name), _TYPES))
                )
        if not _is_scale(loss_scale):
            raise ConfigError(
                f"loss_scale={loss_scale!r}; it must be a pair of the first scale and the smallest one, for instance "
                "(65536.0, 1.0)"
            )
        self.dtype = _check_dtype(dtype, precision)
        self._wanted = wanted if self.dtype is None else [self.dtype]
        self._asked_for_one = (isinstance(precision, str) and precision != "auto") or self.dtype is not None
        self.loss_scale = (float(loss_scale[0]), float(loss_scale[1]))
        name = self._wanted[0] if self._asked_for_one else "fp32"  # Decided in setup.
        self.precision_part = MixedPrecision(name, self.loss_scale)
        if name == "fp16":
            _check_weights(self.unwrap())
        if self.dtype is not None:
            _to_bfloat16(self.unwrap())  # Here: a state may be loaded, or a plan made, before setup.

    @property
    def precision(self) -> str:
        """The precision, "bf16", "fp16" or "fp32"; ``setup`` chooses it where "auto" or a list was given."""
        return self.precision_part.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scale of the loss, in a run in float16."""
        return self.precision_part.scaler

    def materialize(self, module: nn.Module) -> None:
        """Convert what the model has got since the trainer was made."""
        if self.dtype is not None:
            _to_bfloat16(module)
        super().materialize(module)

    def setup(self) -> None:
        """Choose the precision for the device, and prepare the loss scale."""
        super().setup()
        name = self._choose()
        self.precision_part.name = name
        if name == "bf16" and not _is_native("bf16", self.device) and self.is_main:
            _warn_of_slow_bf16(self.device.type, "precision" if self.dtype is None else "dtype")
        if name == "fp16":
            self._check_closures()
        self.precision_part.begin(self.device.type, self.optimizers.values())

    def _check_closures(self) -> None:
        """Refuse a loss scale for an optimizer that evaluates the loss itself, which the scaler cannot step."""
        for name, optimizer in self.optimizers.items():
            if needs_closure(optimizer):
                raise ConfigError(
                    f"precision='fp16' scales the loss, and optimizer {name} ({type(optimizer).__name__}) evaluates it "
                    "itself, several times in a step; write precision='bf16' or 'fp32'"
                )

    def _choose(self) -> str:
        """Return the precision for the device."""
        # A single name is taken as it is; a list, or "auto", is an order of preference among native precisions.
        native = [name for name in self._wanted if self._asked_for_one or _is_native(name, self.device)]
        return native[0] if native else "fp32"

    def teardown(self) -> None:
        """Keep the state of the scaler for the next run."""
        self.precision_part.end()
        super().teardown()

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast the forward, with the loss that is computed in it."""
        return both(super().forward_context(), self.precision_part.forward_context())

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Scale the loss, so that small float16 gradients do not underflow."""
        part = self.precision_part
        super().backward(part.scale(loss) if part.is_scaled else loss, **kwargs)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale."""
        super().unscale()
        if self.precision_part.is_scaled:
            self.precision_part.unscale(self.optimizers.values())

    @replaces
    def step_one(self, optimizer: Optimizer) -> bool:
        """Step through the scaler, which skips an optimizer whose gradients overflowed."""
        is_scaled = self.precision_part.is_scaled
        if not is_scaled or all(p.grad is None for p in parameters_of(optimizer)):
            return super().step_one(optimizer)  # One of several, not used in this step: the scaler would refuse it.
        return self.precision_part.step(optimizer)

    def optimizer_step(self) -> bool:
        """Update the loss scale after the step."""
        stepped = super().optimizer_step()
        if self.precision_part.is_scaled:
            self.precision_part.update()
            if not stepped and self.precision_part.keep_scale_up():
                step = self.progress_checker.step
                _log.warning("step %d overflowed at the smallest loss scale, %g", step, self.loss_scale[1])
        return stepped

    def zero_grad(self) -> None:
        """Reset the scaler after a step that was skipped before the optimizer."""
        super().zero_grad()
        if self.precision_part.is_unscaled:
            self.precision_part.update()

    def describe(self) -> list[Description]:
        """Tell which weights the optimizers step."""
        descriptions = super().describe()
        if self.dtype is None:
            return descriptions
        text = (
            "weights in bfloat16; steps smaller than 1/256 of a weight are lost, unless the optimizer rounds at random"
        )
        return [*descriptions, Description(text, where="optimizer_step")]

    @property
    def _scaler(self) -> dict[str, Any]:
        """The state of the scaler; the last one while there is no scaler."""
        return self.precision_part.state_dict()

    @_scaler.setter
    def _scaler(self, state: Mapping[str, Any]) -> None:
        self.precision_part.load_state_dict(state)

    def adapt_state(self, entry: Any) -> Any:
        """Refuse what is not the state of a GradScaler."""
        saved = entry.get("scaler", {}) if isinstance(entry, Mapping) else {}
        if not isinstance(saved, Mapping) or (saved and not _is_of_a_scaler(saved)):
            raise CheckpointMismatch("the state of AMPAddon contains a 'scaler' that is not one of torch's GradScaler")
        return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_of_a_scaler(state: Mapping[str, Any]) -> bool:
    """Return whether a state has the numbers that torch loads."""
    wanted = torch.amp.GradScaler("cpu").state_dict()
    return wanted.keys() <= state.keys() and all(_is_number(state[name]) for name in wanted)


def _is_scale(value: Any) -> bool:
    """Return whether these are two positive numbers, the second not larger than the first."""
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        return False
    return all(map(_is_number, value)) and 0 < value[1] <= value[0] < math.inf


@cache  # One warning for each process.
def _warn_of_slow_bf16(device: str, option: str) -> None:
    _log.warning(
        "%s='bf16': this %s has no instructions for bfloat16 and emulates them, much slower than fp32; "
        "precision='auto' without dtype uses bf16 only with native support",
        option,
        device,
    )


def _is_native(precision: str, device: torch.device) -> bool:
    """Return whether a device supports a precision natively."""
    if precision == "fp32":
        return True
    if device.type == "cpu":
        return precision == "bf16" and cpu_computes_in_bf16()
    return precision == "fp16" or _accelerator_computes_in_bf16(device)


def _accelerator_computes_in_bf16(device: torch.device) -> bool:
    """Return whether an accelerator has kernels for bfloat16; False where its module of torch does not know."""
    ask = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    if ask is None:
        return False
    try:
        return bool(ask(including_emulation=False))
    except TypeError:  # Not every accelerator emulates it.
        return bool(ask())


def _check_weights(model: nn.Module) -> None:
    """Refuse trained weights in float16, whose gradients cannot be unscaled."""
    low = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype == torch.float16
    ]
    if low:
        raise ConfigError(
            f"precision='fp16' computes in float16 with weights in float32, and {low[0]} is in float16; leave "
            "model.half() out, or write model.to(torch.bfloat16) and precision='bf16'"
        )


def _check_dtype(dtype: Any, precision: Any) -> str | None:
    """Return "bf16", or None for a model that keeps its types; refuse what cannot be trained."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "fp32"}
    name = names.get(dtype, dtype) if dtype is None or isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in _TYPES:
        raise ConfigError(f"dtype={dtype!r}; it must be 'bf16', 'fp32' or None" + did_you_mean(str(name), _TYPES))
    if name == "fp32":
        return None
    if name == "fp16":
        raise ConfigError(
            f"dtype={dtype!r}: gradients of weights in float16 underflow, and torch's GradScaler refuses them; write "
            "precision='fp16', which keeps the weights in float32, or dtype='bf16'"
        )
    if precision not in ("auto", "bf16"):
        raise ConfigError(
            f"precision={precision!r} with dtype='bf16': weights in bfloat16 compute in it; leave precision out"
        )
    return name


def _to_bfloat16(model: nn.Module) -> None:
    """Convert the floating parameters of a model in place; norms and parametrizations are in float32.

    Other buffers keep their types: the frequencies of rotary embeddings are multiplied by positions.
    """
    for module in model.modules():
        is_kept = isinstance(module, _IN_FLOAT32)
        dtype = torch.float32 if is_kept else torch.bfloat16
        for tensor in (*module.parameters(recurse=False), *(module.buffers(recurse=False) if is_kept else ())):
            if tensor.is_floating_point() and tensor.dtype != dtype and type(tensor.data) is Tensor:
                tensor.grad = None
                tensor.data = tensor.data.to(dtype)
