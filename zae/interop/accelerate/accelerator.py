"""An Accelerator for a trainer: made or checked, and shown the model, the optimizers and the schedulers.

All names of Accelerate are used in this package, and nowhere else; its private ones are in this module.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from zae.errors import ConfigError, did_you_mean

__all__ = [
    "Prepared",
    "Settings",
    "check_arguments",
    "check_given",
    "check_loader",
    "check_made",
    "check_plain",
    "load_library",
    "make",
]

_PLUGINS = {
    "deepspeed_plugin": "train with DeepSpeedAddon: deepspeed_config={...}",
    "deepspeed_plugins": "train with DeepSpeedAddon: deepspeed_config={...}",
    "fsdp_plugin": "train with FSDPAddon",
    "megatron_lm_plugin": "train with FSDPAddon, TensorParallelAddon or both",
    "torch_tp_plugin": "train with TensorParallelAddon: tensor_plan={...}",
    "parallelism_config": "train with FSDPAddon, TensorParallelAddon or both: mesh={'shard': 2, 'tensor': 2}",
}
"""Arguments that divide a model, and what to write instead."""

_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
"""What `accelerate launch`, and an Accelerator with a plugin, set in the environment; on a CPU nothing else tells."""

_UNUSED = {
    "device_placement": (True, "the model and the batches go to the device of the trainer"),
    "rng_types": (None, "each rank has random streams of its own, from seed=... of the trainer"),
    "data_seed": (None, "write seed=... of the trainer, from which the order of the data follows"),
    "non_blocking": (False, "write Task.add_on(AccelerateAddon, PrefetchAddon), which copies batches ahead of a step"),
}
"""Arguments, also of DataLoaderConfiguration, that have no effect here: the default, and a reason to leave them out."""

_LOADER_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "data_seed",
                   "non_blocking", "use_stateful_dataloader")  # fmt: skip
"""The fields of DataLoaderConfiguration, which were arguments of an Accelerator before 1.0."""

_MARK = "_is_accelerate_prepared"

_KINDS = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_MUSA",
    "MULTI_SDAA",
    "MULTI_HPU",
)
"""The values of DistributedType in which each process has the whole model."""


def load_library() -> Any:
    """Import Accelerate."""
    try:
        import accelerate
    except ImportError as error:
        text = f"AccelerateAddon needs accelerate ({error}); install it: pip install 'zae[accelerate]'"
        raise ConfigError(text) from error
    return accelerate


class Settings(NamedTuple):
    """What an Accelerator, or the arguments of one, say that a trainer has to know."""

    steps: int = 1
    precision: str = "no"
    plugins: tuple[str, ...] = ()
    compiles: bool = False
    splits: bool = False
    dispatches: bool = False
    kind: str = "NO"
    unused: tuple[str, ...] = ()

    @classmethod
    def of_arguments(cls, given: Mapping[str, Any]) -> Settings:
        """Read arguments."""
        plugin, loaders = given.get("gradient_accumulation_plugin"), given.get("dataloader_config")
        steps = given.get("gradient_accumulation_steps", 1) if plugin is None else plugin.num_steps
        dynamo = getattr(given.get("dynamo_plugin"), "backend", None) or given.get("dynamo_backend") or "no"
        splits, dispatches = (
            given.get(name, getattr(loaders, name, None)) for name in ("split_batches", "dispatch_batches")
        )
        plugins = tuple(name for name in _PLUGINS if given.get(name) is not None)
        precision = str(given.get("mixed_precision") or "no")
        unused = _unused(lambda name, default: given.get(name, getattr(loaders, name, default)))
        return cls(steps, precision, plugins, _name(dynamo) != "NO", bool(splits), bool(dispatches), unused=unused)

    @classmethod
    def of(cls, accelerator: Any) -> Settings:
        """Read an Accelerator, and its settings from the environment."""
        plugins = set(_launched_plugins())
        kind = _name(accelerator.distributed_type)
        own = {"DEEPSPEED": "deepspeed_plugin", "FSDP": "fsdp_plugin", "MEGATRON_LM": "megatron_lm_plugin"}
        plugins |= {own[kind]} if kind in own else set()
        plugins |= {"parallelism_config"} if accelerator.parallelism_config else set()
        return cls(
            accelerator.gradient_accumulation_steps,
            str(accelerator.mixed_precision),
            tuple(sorted(plugins)),
            _name(accelerator.state.dynamo_plugin.backend) != "NO",
            bool(accelerator.split_batches),
            bool(accelerator.dispatch_batches),
            kind,
            _unused(lambda name, default: _setting(accelerator, name, default)),
        )

    def check(self, names: Iterable[str]) -> None:
        """Refuse what zae does itself, or in another way, beside the add-ons with these names."""
        if self.plugins:
            name = self.plugins[0]
            raise ConfigError(f"the Accelerator has a {name}, which AccelerateAddon does not use; leave it out, also "
                              f"of the configuration of accelerate launch, and {_PLUGINS[name]}")  # fmt: skip
        if self.steps > 1:
            raise ConfigError(
                f"the Accelerator has gradient_accumulation_steps={self.steps}, and zae makes the windows of a step; "
                "leave it out there, and in the configuration of accelerate launch, and write "
                f"Task.add_on(AccelerateAddon, GradientAccumulationAddon), gradient_accumulation_steps={self.steps}"
            )
        if self.precision not in ("no", "bf16"):
            other = "'fp16'" if self.precision == "fp16" else "'bf16'"
            raise ConfigError(
                f"the Accelerator has mixed_precision={self.precision!r}, and AccelerateAddon uses 'no' and 'bf16'; "
                f"write mixed_precision='no' there, and Task.add_on(AccelerateAddon, AMPAddon), precision={other}"
            )
        if self.precision != "no" and "AMPAddon" in names:
            raise ConfigError(
                f"the Accelerator has mixed_precision={self.precision!r}, and AMPAddon has a precision too; write "
                "mixed_precision='no' there, or leave AMPAddon out"
            )
        if self.compiles:
            raise ConfigError("the Accelerator compiles the model (dynamo_backend); leave that out, and write "
                              "Task.add_on(AccelerateAddon, CompileAddon)")  # fmt: skip
        if self.splits or self.dispatches:
            name, why = ("split_batches", "batch_size of the loader is that of each rank: divide it by their number")
            if not self.splits:
                name, why = "dispatch_batches", "each rank reads its own share"
            raise ConfigError(f"the Accelerator has {name}=True, and zae gives the ranks their batches; leave it out: "
                              f"{why}")  # fmt: skip
        for name in self.unused:
            raise ConfigError(f"the Accelerator has another {name}, which has no effect on a trainer; leave it out: "
                              f"{_UNUSED[name][1]}")  # fmt: skip
        if self.kind not in _KINDS:
            raise ConfigError(f"the Accelerator has the distributed type {self.kind}; AccelerateAddon trains with "
                              f"{', '.join(_KINDS)}")  # fmt: skip


def _launched_plugins() -> tuple[str, ...]:
    """Return the plugins that the environment asks for."""
    return tuple(name for switch, name in _SWITCHES.items() if os.environ.get(switch, "").lower() == "true")


def _unused(setting: Callable[[str, Any], Any]) -> tuple[str, ...]:
    """Return the names of the settings that were changed, and have no effect."""
    return tuple(name for name, (default, _) in _UNUSED.items() if setting(name, default) != default)


def _setting(accelerator: Any, name: str, default: Any) -> Any:
    """Return a setting of an Accelerator, of which ["generator"] is its own default of rng_types."""
    found = getattr(accelerator.dataloader_config, name, getattr(accelerator, name, default))
    return default if name == "rng_types" and found == ["generator"] else found


def _name(value: Any) -> str:
    """Return the name of a member of an enumeration, or of its text."""
    return str(getattr(value, "name", value)).rpartition(".")[2].upper()


def check_arguments(given: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the arguments of an Accelerator; refuse those that it, or zae, would not take."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"accelerator_args is {given!r:.80}; give a dict of arguments of Accelerator by name")
    found, known = dict(given), list(inspect.signature(load_library().Accelerator).parameters)
    if moved := [name for name in found if name in _LOADER_OPTIONS and name not in known]:
        Settings.of_arguments(found).check(names)
        raise ConfigError(f"accelerator_args has {moved[0]!r}, which zae does itself, and Accelerator takes in "
                          "dataloader_config alone; leave it out")  # fmt: skip
    if unknown := [name for name in found if name not in known]:
        raise ConfigError(
            f"accelerator_args has {unknown[0]!r}, which Accelerator does not take{did_you_mean(unknown[0], known)}"
        )
    group = [each for each in found.get("kwargs_handlers") or () if type(each).__name__ == "InitProcessGroupKwargs"]
    if group:
        raise ConfigError("accelerator_args has InitProcessGroupKwargs, and zae makes the process group; write "
                          "timeout=... and backend=... as options of the trainer")  # fmt: skip
    Settings.of_arguments(found).check(names)
    return found


def check_given(accelerator: Any, names: Iterable[str], devices: int, launched: bool) -> None:
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
    Settings.of(accelerator).check(names)


def check_made(accelerator: Any, device: torch.device, rank: int, world: int) -> None:
    """Refuse an Accelerator of other processes, or on another device, than the trainer."""
    if (accelerator.process_index, accelerator.num_processes) != (rank, world):
        raise ConfigError(
            f"the Accelerator is process {accelerator.process_index} of {accelerator.num_processes}, and the trainer "
            f"rank {rank} of {world}; on CPUs write Accelerator(cpu=True), without which it does not join the ranks of "
            "a launcher, or let the trainer make it: accelerator_args={...}"
        )
    found = torch.device(accelerator.device)
    if found.type != device.type or (found.type != "cpu" and (found.index or 0) != (device.index or 0)):
        raise ConfigError(
            f"the Accelerator uses {found}, and the trainer {device}; leave device out, or write "
            f"device={found.type!r} under a launcher and device={str(found)!r} without one"
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
    for each in (*optimizers, *schedulers):
        if type(each).__module__.partition(".")[0] == "accelerate":
            raise ConfigError(f"a {type(each).__name__} was prepared by an Accelerator already; give the trainer the "
                              "one inside, which it prepares")  # fmt: skip


def make(arguments: Mapping[str, Any], device: torch.device, world: int) -> Any:
    """Make an Accelerator for a rank, which has joined the others."""
    library = load_library()
    Settings(plugins=_launched_plugins()).check(())  # That of FSDP fails on a CPU, in words of its own.
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = {"cpu": device.type == "cpu", **arguments}
    wanted["mixed_precision"] = str(wanted.get("mixed_precision") or precision)
    _forget_others(library.state, wanted["mixed_precision"], device, world)
    try:
        with _threads_kept():
            return library.Accelerator(**wanted)
    except (TypeError, ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"Accelerate refuses accelerator_args={dict(arguments)!r:.200}: {error}") from error


def _forget_others(state: Any, precision: str, device: torch.device, world: int) -> None:
    """Forget what an Accelerator of this process has left that another run has made: they share one state.

    Transformers does so for each TrainingArguments. Else a second trainer could not have another precision, and one
    that has joined other ranks would be alone.
    """
    known = state.PartialState._shared_state
    if known and (known.get("num_processes") != world or torch.device(known["device"]).type != device.type):
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
        self.accelerator, self._model = accelerator, model
        if getattr(model, _MARK, False):
            raise ConfigError(f"the {type(model).__name__} was prepared by an Accelerator already; give the trainer "
                              "the model itself, which it prepares")  # fmt: skip
        self._own_forward = {key: value for key, value in vars(model).items() if key == "forward"}
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        # With this mode it leaves DistributedDataParallel to the trainer, whose ranks have unequal shares.
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def add_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Prepare optimizers in place of those before."""
        _drop(self.accelerator._optimizers, self._optimizers)
        self._optimizers = [self.accelerator.prepare_optimizer(each, device_placement=False) for each in optimizers]

    def add_schedulers(self, schedulers: Iterable[Any]) -> None:
        """Prepare schedulers in place of those before."""
        _drop(self.accelerator._schedulers, self._schedulers)
        self._schedulers = [self.accelerator.prepare_scheduler(each) for each in schedulers]

    def places(self) -> dict[str, list[int]]:
        """Return the numbers of the model, the optimizers and the schedulers in a folder of the Accelerator."""
        own = {"model": [self._model], "optimizer": self._optimizers, "scheduler": self._schedulers}
        lists = {name: getattr(self.accelerator, f"_{name}s") for name in own}
        return {
            name: [next(i for i, held in enumerate(lists[name]) if held is each) for each in several]
            for name, several in own.items()
        }

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


def _drop(held: list[Any], several: Iterable[Any]) -> None:
    for each in several:
        held[:] = [other for other in held if other is not each]
