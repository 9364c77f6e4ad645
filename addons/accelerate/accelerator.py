"""An Accelerator for a trainer: made or checked, and shown the model, the optimizers and the schedulers.

All names of Accelerate are used in this package, and nowhere else; its private ones are in this module.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zae.errors import ConfigError, did_you_mean

__all__ = [
    "Prepared",
    "check_arguments",
    "check_given",
    "check_loader",
    "check_made",
    "check_plain",
    "load_library",
    "make",
]

_INSTEAD = {
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins"), "train with DeepSpeedAddon: deepspeed_config={{...}}"),
    "fsdp_plugin": "train with FSDPAddon",
    **dict.fromkeys(
        ("megatron_lm_plugin", "parallelism_config"),
        "train with FSDPAddon, TensorParallelAddon or both: mesh={{'shard': 2, 'tensor': 2}}",
    ),
    "torch_tp_plugin": "train with TensorParallelAddon: tensor_plan={{...}}",
    "gradient_accumulation_steps": "write Task.add_on(AccelerateAddon, GradientAccumulationAddon), "
    "gradient_accumulation_steps={value}",
    "dynamo_backend": "write Task.add_on(AccelerateAddon, CompileAddon)",
    "split_batches": "divide the batch_size of the loader by the number of ranks, each of which has its own batches",
    "dispatch_batches": "let each rank read its own share",
}
"""What zae does itself, or another engine does, and what to write instead."""

_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
"""What `accelerate launch`, and an Accelerator with a plugin, set in the environment; on a CPU nothing else tells."""

_MARK = "_is_accelerate_prepared"

_KINDS = ("NO", *(f"MULTI_{kind}" for kind in ("CPU", "GPU", "XPU", "NPU", "MLU", "MUSA", "SDAA", "HPU")))
"""The values of DistributedType in which each process has the whole model."""


def load_library() -> Any:
    """Import Accelerate."""
    try:
        import accelerate
    except ImportError as error:
        text = f"AccelerateAddon needs accelerate ({error}); install it: pip install 'zae[accelerate]'"
        raise ConfigError(text) from error
    return accelerate


def _check(settings: Mapping[str, Any], slots: Collection[str]) -> None:
    """Refuse settings by name that ask for what zae does in another way, beside add-ons that fill these slots."""
    for name, remedy in _INSTEAD.items():
        value = settings.get(name)
        if value not in (None, False, "no", "NO", "DynamoBackend.NO") and (name[:8] != "gradient" or value > 1):
            raise ConfigError(
                f"the Accelerator has {name}={value!r:.60}, which AccelerateAddon does not use; leave it out, also of "
                f"the configuration of accelerate launch, and {remedy.format(value=value)}"
            )
    precision = str(settings.get("mixed_precision") or "no")
    if precision not in ("no", "bf16") or (precision != "no" and "precision" in slots):
        supported = "fp16" if precision == "fp16" else "bf16"
        raise ConfigError(
            f"the Accelerator has mixed_precision={precision!r}; AccelerateAddon uses 'no', and without AMPAddon "
            f"'bf16'. Write mixed_precision='no' there, and Task.add_on(AccelerateAddon, AMPAddon), "
            f"precision={supported!r}"
        )


def _settings_of(accelerator: Any) -> dict[str, Any]:
    """Return the settings of an Accelerator by name."""
    names = (
        "gradient_accumulation_steps",
        "split_batches",
        "dispatch_batches",
        "mixed_precision",
        "parallelism_config",
    )
    backend = str(accelerator.state.dynamo_plugin.backend).rpartition(".")[2]
    return {name: getattr(accelerator, name) for name in names} | {"dynamo_backend": backend}


def _launched_plugins() -> dict[str, Any]:
    """Return the plugins that the environment asks for."""
    return {name: True for switch, name in _SWITCHES.items() if os.environ.get(switch, "").lower() == "true"}


def check_arguments(source: Any, slots: Collection[str]) -> dict[str, Any]:
    """Return a copy of the arguments of an Accelerator; refuse what zae does in another way."""
    arguments = dict(source or {})
    parameters = list(inspect.signature(load_library().Accelerator).parameters)
    _check(arguments, slots)
    if unknown := [name for name in arguments if name not in parameters]:
        raise ConfigError(
            f"accelerator_args has {unknown[0]!r}, which Accelerator does not take"
            f"{did_you_mean(unknown[0], parameters)}"
        )
    return arguments


def check_given(accelerator: Any, slots: Collection[str], devices: int, launched: bool) -> None:
    """Refuse an object that is not an Accelerator, or one that cannot train on the ranks."""
    if not isinstance(accelerator, load_library().Accelerator):
        raise ConfigError(
            f"accelerator is a {type(accelerator).__name__}; give an Accelerator, or its arguments: accelerator_args="
            "{'mixed_precision': 'bf16'}"
        )
    if devices > 1 and not launched:
        raise ConfigError(
            "an Accelerator belongs to the process that has made it, and device is a list: run starts a process for "
            "each. Write accelerator_args={...}, or start the script with torchrun or accelerate launch"
        )
    _check(_settings_of(accelerator) | _launched_plugins(), slots)
    if (kind := accelerator.distributed_type.name) not in _KINDS:
        raise ConfigError(
            f"the Accelerator has the distributed type {kind}; AccelerateAddon trains with {', '.join(_KINDS)}"
        )


def check_made(accelerator: Any, device: torch.device, rank: int, world: int) -> None:
    """Refuse an Accelerator of other processes, or on another device, than the trainer."""
    if (accelerator.process_index, accelerator.num_processes) != (rank, world):
        raise ConfigError(
            f"the Accelerator is process {accelerator.process_index} of {accelerator.num_processes}, and the trainer "
            f"rank {rank} of {world}; on CPUs write Accelerator(cpu=True), without which it does not join the ranks of "
            "a launcher, or let the trainer make it: accelerator_args={...}"
        )
    own_device = torch.device(accelerator.device)
    if own_device.type != device.type or (own_device.type != "cpu" and (own_device.index or 0) != (device.index or 0)):
        raise ConfigError(
            f"the Accelerator uses {own_device}, and the trainer {device}; leave device out, or write "
            f"device={own_device.type!r} under a launcher and device={str(own_device)!r} without one"
        )


def check_loader(loader: Any) -> None:
    """Refuse a loader that gives each rank its share already: it would be divided twice."""
    if type(loader).__module__.partition(".")[0] == "accelerate":
        raise ConfigError(
            f"the loader is a {type(loader).__name__}, which accelerator.prepare has made, and zae divides loaders "
            "among the ranks; give run the DataLoader itself"
        )


def check_plain(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
    """Refuse optimizers and schedulers that an Accelerator has wrapped: they would be stepped in its way."""
    for part in (*optimizers, *schedulers):
        if type(part).__module__.partition(".")[0] == "accelerate":
            raise ConfigError(
                f"a {type(part).__name__} was prepared by an Accelerator already; give the trainer the "
                "one inside, which it prepares"
            )


def make(arguments: Mapping[str, Any], device: torch.device, world: int) -> Any:
    """Make an Accelerator for a rank, which has joined the others."""
    library = load_library()
    _check(_launched_plugins(), ())  # That of FSDP fails on a CPU, in words of its own.
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    options = {"cpu": device.type == "cpu", **arguments}
    options["mixed_precision"] = str(options.get("mixed_precision") or precision)
    _forget_others(library.state, options["mixed_precision"], device, world)
    try:
        with _threads_kept():
            return library.Accelerator(**options)
    except (TypeError, ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"Accelerate refuses accelerator_args={dict(arguments)!r:.200}: {error}") from error


def _forget_others(state: Any, precision: str, device: torch.device, world: int) -> None:
    """Forget what an Accelerator of this process has left that another run has made: they share one state.

    Transformers does so for each TrainingArguments. Else a second trainer could not have another precision, and one
    that has joined other ranks would be alone.
    """
    shared = state.PartialState._shared_state
    if shared and (shared.get("num_processes") != world or torch.device(shared["device"]).type != device.type):
        state.AcceleratorState._reset_state(reset_partial_state=True)
    elif state.AcceleratorState._shared_state.get("_mixed_precision", precision) != precision:
        state.AcceleratorState._reset_state()


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Let Accelerate keep the number of threads, which it sets, with a warning, where this variable is not set."""
    is_set = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        yield
    finally:
        if not is_set:
            del os.environ["OMP_NUM_THREADS"]


class Prepared:
    """The objects of a trainer that an Accelerator has prepared, until `release`.

    The model gets Accelerate's autocast around its forward. The optimizers and schedulers are wrapped for what asks the
    Accelerator for them, ``save_state`` for instance; the trainer steps those that it has.

    Attributes
    ----------
    accelerator : Accelerator
        Which has prepared them.
    """

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        self.accelerator = accelerator
        self._model = model
        if getattr(model, _MARK, False):
            raise ConfigError(
                f"the {type(model).__name__} was prepared by an Accelerator already; give the trainer "
                "the model itself, which it prepares"
            )
        self._own_forward = {key: value for key, value in vars(model).items() if key == "forward"}
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        # With this mode it leaves DistributedDataParallel to the trainer, whose ranks have unequal shares.
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def add_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Prepare optimizers in place of those before."""
        _drop(self.accelerator._optimizers, self._optimizers)
        self._optimizers = [
            self.accelerator.prepare_optimizer(optimizer, device_placement=False) for optimizer in optimizers
        ]

    def add_schedulers(self, schedulers: Iterable[Any]) -> None:
        """Prepare schedulers in place of those before."""
        _drop(self.accelerator._schedulers, self._schedulers)
        self._schedulers = [self.accelerator.prepare_scheduler(scheduler) for scheduler in schedulers]

    def places(self) -> dict[str, list[int]]:
        """Return the numbers of the model, the optimizers and the schedulers in a folder of the Accelerator."""
        parts = {"model": [self._model], "optimizer": self._optimizers, "scheduler": self._schedulers}
        indices: dict[str, list[int]] = {}
        for name, several in parts.items():
            ids = [id(prepared) for prepared in getattr(self.accelerator, f"_{name}s")]
            indices[name] = [ids.index(id(part)) for part in several]
        return indices

    def custom_objects(self) -> list[Any]:
        """Return what the user has registered with ``register_for_checkpointing``."""
        return list(self.accelerator._custom_objects)

    def release(self) -> None:
        """Take the objects from the Accelerator, and its autocast from the model."""
        _drop(self.accelerator._models, [self._model])
        self.add_optimizers(())
        self.add_schedulers(())
        vars(self._model).pop(_MARK, None)
        if vars(self._model).pop("_original_forward", None) is not None:
            del self._model.forward
            vars(self._model).update(self._own_forward)


def _drop(objects: list[Any], several: Iterable[Any]) -> None:
    for part in several:
        objects[:] = [other for other in objects if other is not part]
