"""Mixed precision: autocast around the forward, and for fp16 a loss scale around the backward."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zae.addon import AddOnBase, replaces
from zae.common import optim
from zae.common.device import cpu_computes_in_bf16
from zae.common.torch_private import found_overflow
from zae.errors import CheckpointMismatch, ConfigError, did_you_mean

__all__ = ["AMPAddon"]

_log = logging.getLogger("zae")
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class AMPAddon(AddOnBase):
    """Run forward passes in bfloat16 or float16, with gradients unscaled before they are clipped.

    A float16 step whose gradients overflow is skipped: parameters, optimizer, schedulers and averages stay as they
    are, the loss scale is halved, and ``progress_checker.skipped_steps`` counts it; ``step`` counts it too.

    Parameters
    ----------
    precision : {"auto", "bf16", "fp16", "fp32"} or list of them
        "auto" is ``["bf16", "fp16"]``. Of a list, the first that the device computes in natively is taken, else
        "fp32", which changes nothing. A CPU computes in bf16 where it has AVX512_BF16, AMX or Arm's instructions for
        it; on others an explicit "bf16" trains, but much slower than "fp32", and one warning says so.
    loss_scale : (float, float)
        For fp16, the first scale and the least it may fall to. It doubles after 2000 steps without an overflow
        (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

    Raises
    ------
    ConfigError
        A precision is unknown, or the scales are not positive.

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
    state_attributes = ("_scaler",)

    def __init__(
        self,
        *args: Any,
        precision: str | Sequence[str] = "auto",
        loss_scale: tuple[float, float] = (65536.0, 1.0),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        listed = ["bf16", "fp16"] if precision == "auto" else precision
        wanted: list[Any] = list(listed) if isinstance(listed, (list, tuple)) else [listed]
        for name in wanted:
            if not isinstance(name, str) or name not in _TYPES:
                raise ConfigError(
                    f"precision={precision!r}; it must be 'auto', 'bf16', 'fp16', 'fp32' or a list of them"
                    + did_you_mean(str(name), _TYPES)
                )
        if not _is_scale(loss_scale):
            raise ConfigError(f"loss_scale={loss_scale!r}; it must be (first, least) with 0 < least <= first")
        self._wanted = wanted
        self._asked_for_one = isinstance(precision, str) and precision != "auto"
        self.loss_scale = (float(loss_scale[0]), float(loss_scale[1]))
        self.precision = self._wanted[0] if self._asked_for_one else "fp32"  # Settled in setup.
        self.scaler: torch.amp.GradScaler | None = None
        self._scaler_state: dict[str, Any] = {}
        self._stepped = self._unscaled = False
        self._hooks: list[Any] = []

    def setup(self) -> None:
        """Choose the precision for the device, and prepare the loss scale."""
        super().setup()
        # What is asked for by one name is taken; a list, or "auto", is a preference among what is native.
        native = [name for name in self._wanted if self._asked_for_one or _is_native(name, self.device)]
        self.precision = native[0] if native else "fp32"
        if self.precision == "bf16" and not _is_native("bf16", self.device) and self.is_main:
            _warn_of_slow_bf16(self.device.type)
        if self.precision == "fp16":
            scaler = torch.amp.GradScaler(self.device.type, init_scale=self.loss_scale[0])
            if self._scaler_state:
                scaler.load_state_dict(self._scaler_state)
            self.scaler = scaler
            self.nonfinite.scaled = True  # An overflow is what the scale is for.
            self._hooks = [o.register_step_post_hook(self._note_step) for o in self.optimizers.values()]

    def is_idle(self) -> bool:
        """Tell whether the precision is that of the model."""
        return self.precision == "fp32"

    def teardown(self) -> None:
        """Keep the loss scale for the next run."""
        self._scaler_state = self._scaler
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.scaler, self.nonfinite.scaled = [], None, False
        super().teardown()

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast the forward; the loss that is computed in it runs in float32 where torch deems it needful."""
        inner, dtype = super().forward_context(), _TYPES[self.precision]
        return inner if dtype is None else self._autocast(inner, dtype)

    @contextmanager
    def _autocast(self, inner: AbstractContextManager[None], dtype: torch.dtype) -> Iterator[None]:
        with inner, torch.autocast(self.device.type, dtype=dtype):
            yield

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Scale the loss, so that small float16 gradients do not vanish."""
        super().backward(loss if self.scaler is None else _scaled(loss, self.scaler), **kwargs)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, before anybody looks at them."""
        super().unscale()
        if self.scaler is not None:
            for optimizer in self.optimizers.values():
                self.scaler.unscale_(optimizer)
            self._unscaled = True

    @replaces
    def step_one(self, optimizer: Optimizer) -> bool:
        """Step through the scaler, which skips an optimizer whose gradients overflowed."""
        if self.scaler is None or all(p.grad is None for p in optim.parameters_of(optimizer)):
            return super().step_one(optimizer)  # One of several whose turn it is not: the scaler would refuse it.
        # torch would call a fused optimizer all the same, which then makes its state without writing it: a momentum
        # that begins with an overflow is whatever was in that memory.
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        is_fused = is_fused or getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and found_overflow(self.scaler, optimizer):
            return False
        self._stepped = False
        self.scaler.step(optimizer)
        return self._stepped

    def optimizer_step(self) -> bool:
        """Move the loss scale after the step."""
        stepped = super().optimizer_step()
        if self.scaler is not None:
            self._unscaled = False
            self.scaler.update()
            if not stepped:
                self._keep_scale_up(self.scaler)
        return stepped

    def zero_grad(self) -> None:
        """Close a step that was left out before the optimizer: the scale takes no second look at its gradients."""
        super().zero_grad()
        if self.scaler is not None and self._unscaled:
            self._unscaled = False
            self.scaler.update()

    def _note_step(self, *_: Any) -> None:
        """Called by an optimizer that really stepped: reading the scale to find out would wait for the device."""
        self._stepped = True

    def _keep_scale_up(self, scaler: torch.amp.GradScaler) -> None:
        """Hold the scale at its least value, after a skipped step."""
        if scaler.get_scale() < self.loss_scale[1]:
            scaler.update(self.loss_scale[1])
            _log.warning(
                "step %d overflowed at the smallest loss scale, %g", self.progress_checker.step, self.loss_scale[1]
            )

    @property
    def _scaler(self) -> dict[str, Any]:
        """The loss scale and the steps since it last changed, also while there is no scaler."""
        return self._scaler_state if self.scaler is None else dict(self.scaler.state_dict())

    @_scaler.setter
    def _scaler(self, state: Mapping[str, Any]) -> None:
        self._scaler_state = dict(state)
        if self.scaler is not None and state:
            self.scaler.load_state_dict(self._scaler_state)

    def adapt_state(self, entry: Any) -> Any:
        """Refuse what is not the state of a GradScaler."""
        saved = entry.get("scaler", {}) if isinstance(entry, Mapping) else {}
        if not isinstance(saved, Mapping) or (saved and not _is_of_a_scaler(saved)):
            raise CheckpointMismatch("the state of AMPAddon contains a 'scaler' that is not one of torch's GradScaler")
        return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_of_a_scaler(state: Mapping[str, Any]) -> bool:
    """Whether a state has the numbers that torch asks for, one after another as it loads them."""
    wanted = torch.amp.GradScaler("cpu").state_dict()
    return wanted.keys() <= state.keys() and all(_is_number(state[name]) for name in wanted)


def _is_scale(given: Any) -> bool:
    """Whether these are two finite numbers, the second of them not the larger one."""
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        return False
    return all(map(_is_number, given)) and 0 < given[1] <= given[0] < math.inf


def _scaled(loss: Any, scaler: torch.amp.GradScaler) -> Any:
    """Scale one loss, or each of several."""
    if isinstance(loss, Mapping):
        return {key: scaler.scale(each) for key, each in loss.items()}
    return scaler.scale(loss) if isinstance(loss, Tensor) else loss


@cache  # Once for each process, however many trainers there are.
def _warn_of_slow_bf16(device: str) -> None:
    _log.warning(
        "precision='bf16': this %s has no instructions for bfloat16 and emulates it, which is much slower than fp32; "
        "precision='auto' takes bf16 only where it is native",
        device,
    )


def _is_native(precision: str, device: torch.device) -> bool:
    """Whether a device computes in a precision itself, rather than through a slow emulation."""
    if precision == "fp32":
        return True
    if device.type == "cuda":
        return precision == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return precision == "bf16" and cpu_computes_in_bf16()
    return precision == "fp16"
