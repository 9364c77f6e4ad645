"""The emulated accelerator "sim": what a backend outside of torch registers under PrivateUse1."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist

from emulation import setting
from emulation.record import StreamContext, load, record

extension = load("sim")
extension.install(setting("DEVICES", 2), setting("PROTECT", 1) == 1, setting("LIMIT", 0))
extension.set_callback(record)
torch.utils.rename_privateuse1_backend("sim")

generators = tuple(extension.default_generator(index) for index in range(extension.device_count()))
sim: Any = types.ModuleType("torch.sim")
sim._emulation = extension
sim.record = record


def index_of(device: Any = None) -> int:
    """Return the index of a device: an int, a name, a torch.device or None for the current one."""
    if device is None:
        return int(extension.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(extension.current_device()) if index is None else index


class CurrentDevice:
    """Make a device the current one while the block runs."""

    def __init__(self, where: Any) -> None:
        self.index = index_of(where)

    def __enter__(self) -> None:
        self.before = extension.current_device()
        extension.set_device(self.index)

    def __exit__(self, *error: object) -> None:
        extension.set_device(self.before)


def manual_seed(seed: int) -> None:
    generators[index_of()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in generators:
        generator.manual_seed(seed)


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    generators[index_of(device)].set_state(state)


sim._lazy_init = lambda: None
sim._initialized = True  # torch.utils.checkpoint keeps the random stream of a device whose module says so.
sim.is_initialized = lambda: True
sim.is_available = lambda: True
sim._is_in_bad_fork = lambda: False
sim.device = CurrentDevice
sim.device_count = extension.device_count
sim.current_device = extension.current_device
sim.set_device = lambda where: extension.set_device(index_of(where))
sim.synchronize = lambda where=None: extension.synchronize(index_of(where))
sim.get_device_name = lambda where=None: "emulated accelerator"
sim.default_generators = generators
sim.manual_seed = manual_seed
sim.manual_seed_all = manual_seed_all
sim.get_rng_state = get_rng_state
sim.set_rng_state = set_rng_state
sim.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
sim.initial_seed = lambda: generators[index_of()].initial_seed()
sim.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
sim.is_bf16_supported = lambda *_, **__: True
sim.empty_cache = torch.accelerator.empty_cache
sim.memory_allocated = lambda where=None: extension.allocated(index_of(where))
sim.max_memory_allocated = lambda where=None: extension.peak(index_of(where))
sim.reset_peak_memory_stats = lambda where=None: extension.reset_peak(index_of(where))
sim.Stream = torch.Stream
sim.stream = StreamContext
sim.Event = torch.Event
sim.current_stream = lambda where=None: torch.accelerator.current_stream(index_of(where))
torch._register_device_module("sim", sim)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
)


def make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Make a process group of the device: gloo on the host's views of the device's memory."""
    return extension.ccl(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


dist.Backend.register_backend("simccl", make_backend, devices=["sim"])
