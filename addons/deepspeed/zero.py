"""The engine of DeepSpeed around a model: its steps, and whole tensors in and out of its parts.

All names of DeepSpeed are used here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.distributed.collectives import all_reduce
from zae.errors import CheckpointMismatch, ConfigError, DistributedError
from zae.optim import parameters_of
from zae.optim.copies import copy_optimizer
from zae.values.walk import map_tensors

__all__ = ["Zero", "load_library"]

_SHOWN = 5
CHECKED_STEPS = 3  # The first steps in which weights are compared with those of the optimizer: each look costs a pass.


def load_library(device: torch.device) -> Any:
    """Import DeepSpeed for a kind of device; it compiles nothing for a CPU."""
    kind_in_use = os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Of what it imports from torch.
            import deepspeed
    except ImportError as error:
        text = f"DeepSpeedAddon needs deepspeed ({error}); install it: DS_BUILD_OPS=0 pip install 'zae[deepspeed]'"
        raise ConfigError(text) from error
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    assert accelerator is not None
    if (kind := accelerator.device_name().partition(":")[0]) != device.type:
        raise ConfigError(
            f"device is {device.type!r}, and DeepSpeed uses {kind!r} (DS_ACCELERATOR={kind_in_use}); set "
            f"DS_ACCELERATOR={device.type} before deepspeed is imported"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its calls of torch.distributed have another name in the newest torch; nothing that a user could change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if device.type == "cpu":
        # Its collective over shared memory is compiled for minutes at the first call, and gloo does the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Zero:
    """A model that DeepSpeed trains, with the optimizer that the trainer shows.

    The trainer's optimizer holds the parameters of the model, and its groups say the learning rate. DeepSpeed steps a
    copy of it, whose parameters are flat parts of all. A state that is loaded waits in the trainer's optimizer until
    `settle`.

    Attributes
    ----------
    engine : DeepSpeedEngine
        What ``train_step`` calls as the model.
    stage : int
        0 to 3.
    trained : list of Parameter
        Those that require a gradient; they stay the same.
    """

    def __init__(self, library: Any, model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any]) -> None:
        self._library = library
        self.model = model
        self.optimizer = optimizer
        self.stage: int = config["zero_optimization"]["stage"]
        self.is_bf16: bool = config["bf16"]["enabled"]
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
        self._used: set[int] = set()
        self._forwards = 0
        self._is_open = False
        self._checks_left = CHECKED_STEPS
        self._stepped = optimizer if self.stage == 0 else _twin(optimizer)
        self._groups = [group for group in optimizer.param_groups if _is_trained(group)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Of what it imports from torch.
            self.engine, self._zero, *_ = library.initialize(
                model=model, optimizer=self._stepped, config=dict(config), dist_init_required=False
            )
        self._settled = optimizer.state
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._note_used)
        self.engine.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        if self.is_bf16:
            model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        if self.stage == 3 or self.is_bf16:
            model.register_state_dict_post_hook(partial(self._show_whole))  # Torch marks it: no method.

    # ------------------------------------------------------------------------------------------------- a step

    def _note_used(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def _begin_forward(self, *_: Any) -> None:
        self._forwards += 1

    def begin_window(self, present: Sequence[Tensor]) -> None:
        """Refuse parameters that were frozen, unfrozen or replaced, and a window after one that has failed."""
        if [id(parameter) for parameter in present if parameter.requires_grad] != [
            id(parameter) for parameter in self.trained
        ]:
            raise ConfigError(
                "a parameter was frozen, unfrozen, added or replaced after DeepSpeed has divided the model; do that "
                "before run(), or train with MultiGPUAddon"
            )
        if self._is_open:
            raise DistributedError(
                "the last step has failed, and DeepSpeed holds some of its gradients; begin a new process, and resume "
                "from the last checkpoint"
            )
        self.settle()
        self.check_weights()
        self._is_open = True

    def check_weights(self) -> None:
        """Refuse weights that were changed in place: the next step would set them to what the optimizer has."""
        if self.stage in (0, 3) or self._checks_left == 0:
            return
        self._checks_left -= 1
        rank = dist.get_rank()
        zero = self._zero
        pairs = zip(zero.parallel_partitioned_bit16_groups, zero.single_partition_of_fp32_groups)
        is_changed = any(not torch.equal(parts[rank], flat.detach().to(parts[rank].dtype)) for parts, flat in pairs)
        # Each rank has looked at its part: where one has found a change, all of them refuse.
        ranks_with_changes = torch.tensor(float(is_changed), device=zero.device)
        all_reduce(ranks_with_changes)
        if ranks_with_changes:
            raise ConfigError(
                "weights were changed in place between two steps, and DeepSpeed keeps them in the optimizer: the "
                "change would be lost. Change them before run() or with apply_weights, or train with MultiGPUAddon"
            )

    def begin_batch(self, last: bool) -> None:
        """Begin a micro-batch; gradients are brought together in the last one at the latest."""
        self._forwards = 0
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss of the whole model."""
        if isinstance(loss, Mapping) or kwargs.keys() - {"retain_graph"}:
            arguments = "one loss for each optimizer" if isinstance(loss, Mapping) else ", ".join(kwargs)
            raise ConfigError(
                f"DeepSpeed differentiates one loss by all parameters, and not with {arguments}; return one "
                "loss, or train with MultiGPUAddon"
            )
        if not self._forwards:
            raise ConfigError(
                "train_step did not call the model that DeepSpeed has wrapped; call all of it, "
                "self.model(...), not its parts, or train with MultiGPUAddon"
            )
        self.engine.backward(loss, **kwargs)

    def check_used(self) -> None:
        """Refuse a step that left parameters without gradients: DeepSpeed would step them with zeros."""
        missing = [self.names[id(parameter)] for parameter in self.trained if id(parameter) not in self._used]
        self._used.clear()
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise DistributedError(
                f"train_step did not use {', '.join(missing[:_SHOWN])}{more}, which DeepSpeed would step with a "
                "gradient of zero; freeze them before run(), parameter.requires_grad_(False), or train with "
                "MultiGPUAddon, find_unused_parameters=True"
            )

    def gradients(self) -> list[Any]:
        """Return objects whose ``grad`` is this rank's part of the averaged gradients; change it in place."""
        if self.stage == 0:
            return [parameter for parameter in self.trained if parameter.grad is not None]
        parts: list[Tensor] = []
        for group in self._zero.averaged_gradients.values():
            parts += group or ()
        return [SimpleNamespace(grad=part) for part in parts]

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradients, equal on all ranks."""
        parts = [torch.linalg.vector_norm(gradient.grad).double().square() for gradient in self.gradients()]
        square = torch.stack(parts).sum()
        if self.stage:  # Each rank has squared its parts; in stage 0 it has all of the gradients.
            all_reduce(square)
        return square.sqrt().float()

    def step(self) -> bool:
        """Step with the settings of the trainer's optimizer; return False where DeepSpeed left the step out."""
        self._is_open = False
        if self.stage:
            for group, twin in zip(self._groups, self._stepped.param_groups, strict=True):
                twin.update({key: value for key, value in group.items() if key != "params"})
        self.engine.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # Schedulers read it.
        return bool(self.engine.was_step_applied())

    def drop_window(self) -> None:
        """Drop the gradients of a step that is left out: DeepSpeed drops those whose norm is not finite."""
        if not self._is_open:
            return
        self._is_open = False
        if self.stage:
            if dist.get_rank() == 0:  # Its parts begin with an element of a parameter; others may be padding alone.
                self.gradients()[0].grad.view(-1)[0] = float("nan")
            self.engine.step()

    # ----------------------------------------------------------------------------------------------- whole tensors

    def _show_whole(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Show the shapes and types of the plain model in its ``state_dict``, without values."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                shape = self._shapes[id(parameter)]
                state[prefix + name] = torch.empty(shape, dtype=torch.float32, device="meta")

    def _is_held(self, parameter: Tensor) -> bool:
        """Return whether the weight is a part of a flat tensor in float32."""
        return parameter.requires_grad and self.stage > 0

    @torch.no_grad()
    def whole(self, parameter: Tensor) -> Tensor:
        """Return a weight in the precision of the optimizer, whole on each rank; all ranks call it."""
        if self._is_held(parameter) and (self.stage == 3 or self.is_bf16):
            weight: Tensor = self._library.utils.safe_get_full_fp32_param(parameter)
            return weight.reshape(self._shapes[id(parameter)])
        if self.stage == 3:
            with self._library.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach()

    @torch.no_grad()
    def set_weights(self, weights: Mapping[int, Tensor]) -> None:
        """Set whole weights, by the id of the parameter; all ranks call it."""
        if self.stage == 3:
            self._zero._partition_all_parameters()
        for parameter in self.model.parameters():
            if id(parameter) not in weights:
                continue
            value = weights[id(parameter)].to(parameter.device)
            if self._is_held(parameter):
                self._set_part(parameter, value)
            elif self.stage == 3:
                with self._library.zero.GatheredParameters([parameter], modifier_rank=0):
                    if dist.get_rank() == 0:
                        parameter.copy_(value)
            else:
                parameter.copy_(value)
        self._publish()

    def _set_part(self, parameter: Tensor, value: Tensor, slot: str = "") -> None:
        """Set this rank's part of a weight, or of a slot of its state, to that of a whole tensor."""
        key = (slot,) if slot else ()
        value = value.float()
        utils = self._library.utils
        if self.stage == 3:  # The function for whole tensors fails where their parts are padded.
            count = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            part = value.flatten()[dist.get_rank() * count :][:count]
            part = nn.functional.pad(part, (0, count - part.numel()))
            (utils.safe_set_local_optimizer_state if slot else utils.safe_set_local_fp32_param)(parameter, part, *key)
        else:
            (utils.safe_set_full_optimizer_state if slot else utils.safe_set_full_fp32_param)(parameter, value, *key)

    def _publish(self) -> None:
        """Let the model compute with the weights of the optimizer."""
        if self.stage == 3:
            for index in range(len(self._zero.fp16_groups)):
                self._zero._reassign_or_swap_out_partitioned_parameters(index)
            if persistent := self._zero.persistent_parameters:
                persistent[0].all_gather(persistent)
        elif self.stage:
            self._zero.update_lp_params()

    def _flats(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield each flat part of the optimizer with the parameters that it is a part of."""
        zero = self._zero
        if self.stage == 3:
            yield from zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        elif self.stage:
            yield from zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)

    @contextlib.contextmanager
    def whole_slots(self) -> Iterator[None]:
        """Put the whole state of the optimizer into that of the trainer within the block; all ranks call it."""
        self.settle()
        if self.stage == 0:
            yield
            return
        read = self._library.utils.safe_get_full_optimizer_state
        for flat, parameters in self._flats():
            slots = self._stepped.state.get(flat, {})
            if slots:
                for parameter in parameters:
                    shape = self._shapes[id(parameter)]
                    self.optimizer.state[parameter] = {
                        key: read(parameter, key).cpu().reshape(shape) if _is_slot(value, flat) else _copy(value)
                        for key, value in slots.items()
                    }
        try:
            yield
        finally:
            self.optimizer.state.clear()

    @torch.no_grad()
    def settle(self) -> None:
        """Take over a state that was loaded into the trainer's optimizer."""
        loaded: Any = self.optimizer.state
        if self.stage == 0 or (loaded is self._settled and not loaded):
            return
        states = {}
        for flat, parameters in self._flats():
            values = [loaded.get(parameter) for parameter in parameters]
            if any(values):
                states[flat] = _flat_state(flat, values, [self._shapes[id(parameter)] for parameter in parameters])
        self._stepped.state = defaultdict(dict, states)
        if self.stage != 3:
            self._zero._hp_optimizer_states_linked = False
            if states:
                self._zero._lazy_init_hp_params_optimizer_state()
        for flat, parameters in self._flats():
            for key in (key for key, value in states.get(flat, {}).items() if _is_slot(value, flat)):
                for parameter in parameters:
                    self._set_part(parameter, loaded[parameter][key], key)
        self.optimizer.state.clear()
        self._settled = self.optimizer.state


def _is_trained(group: Mapping[str, Any]) -> bool:
    return any(parameter.requires_grad for parameter in group["params"])


def _is_slot(value: Any, flat: Tensor) -> bool:
    """Return whether an entry of a state has an element for each of the parameters."""
    return isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _flat_state(flat: Tensor, states: list[Any], shapes: list[torch.Size]) -> dict[str, Any]:
    """Return the state of a flat part, whose slots are still zeros; refuse parameters that are at different steps."""
    first = states[0] or {}
    flat_state: dict[str, Any] = {}
    is_alike = all(set(state or {}) == set(first) for state in states)
    if is_alike:
        for key, value in first.items():
            several = [state[key] for state in states]
            if key != "step" and all(isinstance(v, Tensor) and v.shape == s for v, s in zip(several, shapes)):
                flat_state[key] = torch.zeros_like(flat, requires_grad=False)
            elif value is None or all(bool(torch.as_tensor(v == value).all()) for v in several):
                flat_state[key] = _copy(value)
            else:
                is_alike = False
    if not is_alike:
        raise CheckpointMismatch(
            "the parameters of a group have different states in the optimizer, such as steps, and ZeRO keeps "
            "one for all of a group; load the weights alone: apply_weights(path)"
        )
    return flat_state


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups of the same parameters that are trained, and without a state."""
    parameters = {id(parameter): parameter for parameter in parameters_of(optimizer)}
    twin = copy_optimizer(optimizer, dict(parameters), state=defaultdict(dict))
    for group in twin.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    return twin


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast what the model is called with to bfloat16, in which it computes."""

    def cast(value: Tensor) -> Tensor:
        return value.bfloat16() if value.is_floating_point() else value

    return map_tensors(cast, args), map_tensors(cast, kwargs)
