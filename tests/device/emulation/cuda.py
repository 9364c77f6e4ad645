"""An emulated CUDA in a build of torch for the CPU: what torch's own build for CUDA has, as far as trainers use it."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import types
from typing import Any

import torch
import torch.cuda.memory
import torch.cuda.random
import torch.distributed as dist
import torch.storage

from emulation.hooks import DEVICES, LIMIT, PROTECT
from emulation.record import StreamContext, load, record

extension = load("cuda")
extension.install(DEVICES, PROTECT == 1, LIMIT)
extension.set_callback(record)
cuda: Any = torch.cuda
cuda._emulation = extension
cuda.record = record
generators = tuple(extension.default_generator(index) for index in range(DEVICES))
torch.version.cuda = "12.8"
torch.backends.cuda.is_built = lambda: True


# Processes: CUDA cannot be used in a child of a process that has used it.

in_bad_fork = False
initializing = threading.RLock()


def after_fork() -> None:
    global in_bad_fork
    in_bad_fork = cuda._initialized


os.register_at_fork(after_in_child=after_fork)


def is_initialized() -> bool:
    return cuda._initialized and not in_bad_fork


def initialize() -> None:
    """Do what torch.cuda.init does: refuse a forked process, and make the calls that waited for CUDA."""
    if is_initialized():
        return
    with initializing:
        if is_initialized():
            return
        if in_bad_fork:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        cuda.default_generators = generators
        cuda._initialized = True
        queued = [*cuda._queued_calls, *cuda._lazy_seed_tracker.get_calls()]
        for call, _ in filter(None, queued):
            if call.__name__ not in ("_check_capability", "_check_cubins"):
                call()


cuda._is_compiled = lambda: True
cuda.is_available = lambda: DEVICES > 0
cuda._is_in_bad_fork = lambda: in_bad_fork
cuda.is_initialized = is_initialized
cuda._lazy_init = initialize
cuda.init = initialize
for module in (torch.cuda.random, torch.cuda.memory):
    module._lazy_init = initialize
    if hasattr(module, "_lazy_call"):
        module._lazy_call = lambda call, **options: cuda._lazy_call(call, **options)


# Devices.


def current_device() -> int:
    initialize()
    return int(extension.current_device())


def index_of(device: Any = None) -> int:
    """Return the index of a device: an int, a name, a torch.device or None for the current one."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def set_device(device: Any) -> None:
    index = index_of(device)
    if index >= 0:
        initialize()
        extension.set_device(index)


def exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        extension.set_device(index)
    return before


def synchronize(device: Any = None) -> None:
    initialize()
    extension.synchronize(index_of(device))


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=cuda.get_device_name(), major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
    )


cuda.device_count = extension.device_count
cuda.current_device = current_device
cuda.set_device = set_device
cuda.synchronize = synchronize
cuda._exchange_device = lambda index: exchange_device(index)
cuda._maybe_exchange_device = lambda index: exchange_device(index)
cuda.random.current_device = current_device
cuda.random.device_count = extension.device_count
cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3 (emulated)"
cuda.get_device_capability = lambda device=None: (9, 0)
cuda.get_device_properties = get_device_properties
cuda.is_bf16_supported = lambda including_emulation=True: True
cuda.get_arch_list = lambda: ["sm_90"]
cuda.is_current_stream_capturing = lambda: False
torch._C._cuda_init = lambda: None
torch._C._cuda_getDeviceCount = lambda: extension.device_count()
# Functions of their own: torch.compile has a table of functions, and refuses one that stands in it twice.
torch._C._cuda_getDevice = lambda: extension.current_device()
torch._C._cuda_setDevice = lambda index: set_device(index)
torch._C._cuda_exchangeDevice = lambda index: exchange_device(index)
torch._C._cuda_maybeExchangeDevice = lambda index: exchange_device(index)
torch._C._cuda_synchronize = lambda: synchronize()
torch._C._cuda_getCurrentRawStream = lambda device=0: torch.accelerator.current_stream(device).stream_id


# Memory.


def empty_cache() -> None:
    initialize()
    torch.accelerator.empty_cache()


MEMORY = {
    "memory_allocated": lambda device=None: extension.allocated(index_of(device)),
    "max_memory_allocated": lambda device=None: extension.peak(index_of(device)),
    "memory_reserved": lambda device=None: extension.allocated(index_of(device)),
    "max_memory_reserved": lambda device=None: extension.peak(index_of(device)),
    "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index_of(device)),
    "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(index_of(device)),
    "memory_stats": lambda device=None: torch.accelerator.memory_stats(index_of(device)),
    "empty_cache": empty_cache,
}
for name, function in MEMORY.items():
    setattr(cuda, name, function)
    setattr(cuda.memory, name, function)


# Streams, events and waits.


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        initialize()
        return super().__new__(cls, torch.device("cuda", index_of(device)))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        initialize()
        return super().__new__(cls, "cuda", enable_timing=enable_timing)


def set_sync_debug_mode(mode: int | str) -> None:
    """Count waits ("warn"), or raise at the first one ("error"), as torch does."""
    number = {"default": 0, "warn": 1, "error": 2}.get(mode, mode) if isinstance(mode, str) else mode
    record.counts_waits = number > 0
    record.refuses_waits = number == 2


cuda.Stream = Stream
cuda.Event = Event
cuda.stream = StreamContext
cuda.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
cuda.default_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
cuda.set_sync_debug_mode = set_sync_debug_mode
cuda.get_sync_debug_mode = lambda: 2 if record.refuses_waits else int(record.counts_waits)


# Storages: what torch's build for the CPU has no code for.

plain_to = torch._utils._to
plain_clone = torch.UntypedStorage.clone
plain_resize = torch.UntypedStorage.resize_


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copy_storage(storage: torch.UntypedStorage, device: torch.device, non_blocking: bool) -> torch.UntypedStorage:
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    if storage.nbytes():
        made.copy_(as_bytes(storage), non_blocking)
    return made.untyped_storage()


def storage_to(self: Any, device: Any, non_blocking: bool = False) -> Any:
    target = torch.device(device)
    if isinstance(self, torch.UntypedStorage) and target.type == "cuda" and self.device.type == "cpu":
        return copy_storage(self, target, non_blocking)
    return plain_to(self, target, non_blocking)


def storage_clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return plain_clone(self)
    return copy_storage(self, self.device, non_blocking=False)


def storage_resize(self: torch.UntypedStorage, size: int) -> Any:
    if self.device.type != "cuda":
        return plain_resize(self, size)
    with torch.no_grad():
        extension.resize_storage(as_bytes(self), size)
    return self


torch._utils._to = storage_to
torch.storage._to = storage_to
torch.UntypedStorage.clone = storage_clone
torch.UntypedStorage.resize_ = storage_resize


# NCCL: gloo on the host's views of the device's memory.


class AnyBackend(type):
    """Let every process group of a backend be an instance, as torch asks of ProcessGroupNCCL."""

    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, torch._C._distributed_c10d.Backend)


class ProcessGroupNCCL(metaclass=AnyBackend):
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout: datetime.timedelta | None = None
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        timeout = getattr(options, "_timeout", None) or datetime.timedelta(minutes=10)
        return extension.ccl(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
c10d.ProcessGroupNCCL = ProcessGroupNCCL
c10d._NCCL_AVAILABLE = True
c10d.is_nccl_available = lambda: True
dist.is_nccl_available = c10d.is_nccl_available
torch._C._nccl_version = lambda: (2 << 32) | (27 << 16) | 5
torch._C._nccl_version_suffix = lambda: b""
