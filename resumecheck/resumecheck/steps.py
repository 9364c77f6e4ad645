"""Record what each optimizer step of this process depends on and what it does, as one row of hashes.

It runs in the process that trains and imports nothing but the standard library: torch is given. A hash is a sum of
64-bit words, so that any flipped bit changes it. The words of inputs are multiplied by their places, as their order
counts. Of optimizer states, which tell a cause and no verdict, some thousand words of each tensor are summed. Sums are
made on the device of the tensor, and those of a step are read at once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Recorder", "digest", "fingerprints", "number", "wrap"]

_KEYED_WORDS = 1 << 16
_SAMPLED_WORDS = 4096
_GOLDEN = 0x9E3779B97F4A7C15  # Spreads a sum over all of its bits.

Row = dict[str, Any]


class Recorder:
    """Write a row for each step of an optimizer of ``torch.optim``.

    Parameters
    ----------
    torch : module
        The torch of this process.
    write : callable
        Takes each row, a dict that JSON takes.
    by : str
        "optimizer", or "backward": a row for each backward, of a loop whose optimizer is not of ``torch.optim``.
    """

    def __init__(self, torch: Any, write: Callable[[Row], None], by: str = "optimizer") -> None:
        self.torch, self.write, self.by = torch, write, by
        self.begin_process()
        os.register_at_fork(after_in_child=self.begin_process)
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        torch.nn.Module.compile = wrap(torch.nn.Module.compile, self.compile)
        torch.Tensor.backward = wrap(torch.Tensor.backward, self.backward)
        torch.amp.GradScaler.step = wrap(torch.amp.GradScaler.step, self.scaled_step)
        sampler = importlib.import_module("torch.utils.data.sampler").RandomSampler
        sampler.__iter__ = wrap(sampler.__iter__, self.shuffle)
        batches = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
        batches.__init__ = wrap(batches.__init__, self.begin_epoch)
        batches.__next__ = wrap(batches.__next__, self.load_batch)
        set_state = wrap(torch.set_rng_state, self.restore_random("torch"))
        torch.set_rng_state = torch.random.set_rng_state = set_state
        random.setstate = wrap(random.setstate, self.restore_random("python"))

    def begin_process(self) -> None:
        """Begin as a process that has done nothing: a forked one is another process."""
        self.count = 0
        self.backwards = 0
        self.root: Any = None
        self.optimizer_names: dict[int, str] = {}
        self.parameter_names: dict[int, str] = {}
        self.named_models: set[int] = set()
        self.versions: dict[str, list[int]] = {}
        self.weights_after: dict[str, str] = {}
        self.starts: list[dict[str, Any]] = []
        self.restored: dict[str, str] = {}
        self.views: dict[int, tuple[Any, int, Any]] = {}
        self.begin_row()

    def begin_row(self) -> None:
        """Forget what was seen since the step before."""
        self.inputs: list[Any] = []
        self.shapes: list[Any] = []
        self.losses: list[Any] = []
        self.batches: list[Any] = []
        self.random: dict[str, str] | None = None
        self.scale: Any = None
        self.is_shuffled = self.is_new_epoch = False
        self.models: dict[int, Any] = {}

    # --- steps

    def before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Hash what an optimizer begins with."""
        if self._is_captured():
            return
        name, weights = self._name(optimizer), parameters_of(optimizer)
        start: dict[str, Any] = {}
        if name not in self.versions:
            start["state_before"] = self._state_sums(optimizer, weights)
        if self.versions.get(name) != [each._version for each in weights]:  # Else they are those after the step before.
            start["before"] = self.sums(weights)
        self.starts.append(start)

    def after_step(self, optimizer: Any, args: Any = (), kwargs: Any = None, skipped: bool = False) -> None:
        """Write the row of a step."""
        if self._is_captured():
            return
        weights = parameters_of(optimizer)
        groups = [{k: each[k] for k in optimizer.defaults if k in each} for each in optimizer.param_groups]
        state = self._state_sums(optimizer, weights)
        self._write_row(self._name(optimizer), weights, self.starts.pop(), groups, state, skipped)

    def _is_captured(self) -> bool:
        """Return whether a step goes into a CUDA graph: it is not made now, and what replays it is not seen."""
        cuda = self.torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def _write_row(
        self,
        name: str,
        weights: list[Any],
        start: dict[str, Any],
        groups: list[dict[str, Any]],
        state: list[Any],
        skipped: bool = False,
    ) -> None:
        is_first = "state_before" in start
        models = [model for reference in self.models.values() if (model := reference()) is not None]
        sums = {**start, "after": self.sums(weights), "state": state, "inputs": self.inputs, "batches": self.batches}
        sums["buffers"] = self.sums([each for model in models for each in model.buffers()])
        sums["loss"] = self.losses
        sums["scale"] = [] if self.scale is None else [self.scale]
        if is_first:
            trained = {id(each) for each in weights}
            frozen = [each for model in models for each in model.parameters() if not each.requires_grad]
            sums["frozen"] = self.sums([each for each in frozen if id(each) not in trained])
            names = [self.parameter_names.get(id(each), f"parameter {index}") for index, each in enumerate(weights)]
            size = sum(each.numel() * each.element_size() for each in weights)
            self.write({"kind": "optimizer", "optimizer": name, "names": names, "bytes": size})
        numbers = self._read(sums)
        self.count += 1
        row: Row = {"kind": "step", "n": self.count, "optimizer": name, "skipped": skipped}
        row.update({key: digest(value) for key, value in numbers.items() if key not in ("loss", "scale")})
        row["buffers"] = digest(sorted(numbers["buffers"]))
        row.setdefault("before", self.weights_after.get(name, ""))
        row["unchanged"] = row["before"] == row["after"]
        row["parts"] = fingerprints(numbers["after"])
        if is_first:
            row["parts_before"] = fingerprints(numbers["before"])
            row["restored"] = self.restored
        row["loss"], row["scale"] = [number(each) for each in numbers["loss"]], numbers["scale"]
        row["lr"] = [number(each.get("lr")) for each in groups]
        row["options"] = digest([sorted((key, _option(value)) for key, value in each.items()) for each in groups])
        row["random"] = self.random or self.random_streams()
        row["shapes"], row["seen"] = digest(self.shapes), len(self.inputs)
        row["shuffled"], row["new_epoch"] = self.is_shuffled, self.is_new_epoch
        self.weights_after[name], self.versions[name] = row["after"], [each._version for each in weights]
        self.begin_row()
        self.write(row)

    # --- what a step depends on

    def before_forward(self, module: Any, args: Any) -> None:
        """Note the outermost module that is called, and the random state before the first one of a step."""
        if self.torch.compiler.is_compiling():  # What is traced here is compiled into the step.
            return
        if self.root is None and self.torch.is_grad_enabled():
            self.root = module
            if self.random is None:
                self.random = self.random_streams()

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Hash the inputs of the outermost module: the tensors that are no results of others."""
        if self.torch.compiler.is_compiling() or module is not self.root:
            return
        self.root = None
        self.models.setdefault(id(module), weakref.ref(module))
        if id(module) not in self.named_models:
            self.named_models.add(id(module))
            for name, each in module.named_parameters():
                self.parameter_names.setdefault(id(each), name)
        for each in tensors_in(self.torch, (args, kwargs)):
            if not each.requires_grad:
                self.shapes.append((str(each.dtype), tuple(each.shape)))
                self.inputs.append(self.ordered_sum(each))

    def compile(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        """See the calls of a module that is compiled in place, with the hooks around it."""
        original(module, *args, **kwargs)
        compiled = module._compiled_call_impl

        def call(*inputs: Any, **named: Any) -> Any:
            self.before_forward(module, inputs)
            output = compiled(*inputs, **named)
            self.after_forward(module, inputs, named, output)
            return output

        module._compiled_call_impl = call

    def backward(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss; without an optimizer of torch.optim, the weights before its update are a row."""
        self.losses.append(tensor.detach())
        result = original(tensor, *args, **kwargs)
        if self.by == "backward":
            models = [model for reference in self.models.values() if (model := reference()) is not None]
            weights = [each for model in models for each in model.parameters() if each.requires_grad]
            start: dict[str, Any] = {"before": self.sums(weights)}
            if not self.count:
                start["state_before"] = []
            self._write_row("backward", weights, start, [], [])
        elif not self.count:
            self.backwards += 1
            if self.backwards == 3:
                self.write({"kind": "backward"})
        return result

    def scaled_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss scale; a step that it leaves out has a row as well."""
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        self.scale = None if scaler._scale is None else scaler._scale.detach().clone()
        before = self.count
        result = original(scaler, optimizer, *args, **kwargs)
        if self.count == before:
            self.before_step(optimizer)
            self.after_step(optimizer, skipped=True)
        return result

    def shuffle(self, original: Any, sampler: Any) -> Any:
        """Note that the order of an epoch is drawn from the random stream of the process."""
        self.is_shuffled |= sampler.generator is None and self.torch.is_grad_enabled()
        return original(sampler)

    def begin_epoch(self, original: Any, batches: Any, loader: Any) -> None:
        """Note a new epoch, and that the seed of workers is drawn from the random stream of the process."""
        if self.torch.is_grad_enabled():
            self.is_new_epoch = True
            self.is_shuffled |= loader.num_workers > 0 and loader.generator is None
        original(batches, loader)

    def load_batch(self, original: Any, batches: Any) -> Any:
        """Hash the samples of a batch as the loader gives it."""
        batch = original(batches)
        if self.torch.is_grad_enabled():
            self.batches += [self.ordered_sum(each) for each in tensors_in(self.torch, batch)]
        return batch

    def restore_random(self, stream: str) -> Callable[..., Any]:
        """Note to what a stream was set before the first step."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self.count:
                self.restored[stream] = self.random_streams()[stream]
            return result

        return call

    # --- sums

    def fingerprints_in(self, value: Any) -> str:
        """Return the fingerprints of the tensors in an object that is saved."""
        tensors = list(tensors_in(self.torch, value, is_deep=True))
        return fingerprints(self._read({"tensors": [self._sum(each) for each in tensors]})["tensors"])

    def sums(self, tensors: Iterable[Any], words: int = 0) -> list[Any]:
        """Sum each of some tensors that live on: what prepares a sum is done once."""
        return [self._sum_of_part(each, words) for each in tensors]

    def _sum_of_part(self, tensor: Any, words: int) -> Any:
        torch = self.torch
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return self._sum(tensor, words)
        prepared, place = self.views.get(id(tensor)), tensor.data_ptr()
        if prepared is not None and prepared[0]() is tensor and prepared[1] == place:
            return prepared[2].sum(dtype=torch.int64)
        view = self._integers(tensor, words)
        if view is not None and view.data_ptr() == place:
            self.views[id(tensor)] = weakref.ref(tensor), place, view
        return 0 if view is None else view.sum(dtype=torch.int64)

    def _sum(self, tensor: Any, words: int = 0) -> Any:
        """Sum the integers of a tensor, or about so many of them, on its device."""
        view = self._integers(tensor, words)
        return 0 if view is None else view.sum(dtype=self.torch.int64)

    def _integers(self, tensor: Any, words: int) -> Any:
        """Return a tensor as 64-bit words, or as integers of its own size where it fills no words; None if empty."""
        torch, data = self.torch, plain(self.torch, tensor)
        size, count = data.element_size(), data.numel()
        if not count:
            return None
        flat, ratio = data.contiguous().reshape(-1), 8 // size
        if count % ratio:
            integers = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
        else:
            integers = (flat.clone() if flat.storage_offset() % ratio else flat).view(torch.int64)
        stride = integers.numel() // words if words else 1
        return integers[:: stride | 1] if stride > 1 else integers

    def ordered_sum(self, tensor: Any) -> Any:
        """Sum the 64-bit words of a tensor, each times its place."""
        torch, data = self.torch, plain(self.torch, tensor).contiguous().reshape(-1)
        if not data.numel():
            return 0
        data = data.view(torch.uint8)
        rest = data.numel() % 8
        if rest or data.storage_offset() % 8:
            data = torch.cat([data, data.new_zeros(8 - rest if rest else 0)])
        words = data.view(torch.int64)
        keys = self.__dict__.setdefault("keys", {})
        if words.device not in keys:
            keys[words.device] = torch.arange(1, 2 * _KEYED_WORDS, 2, device=words.device) * 0x5851F42D4C957F2D
        key, total = keys[words.device], 0
        for start in range(0, words.numel(), _KEYED_WORDS):
            part = words[start : start + _KEYED_WORDS]
            total = total * 1000003 + (part * key[: part.numel()]).sum()
        return total

    def _state_sums(self, optimizer: Any, weights: list[Any]) -> list[Any]:
        """Hash the state of an optimizer: its tensors by sums, all else by its text."""
        values: list[Any] = []
        for each in weights:
            state = optimizer.state.get(each) or {}
            for key in sorted(state, key=str):
                value = state[key]
                if isinstance(value, self.torch.Tensor):
                    values.append(self._sum_of_part(value, _SAMPLED_WORDS))
                elif value is not None and not callable(value):
                    values.append(f"{key}={value!r:.200}")
        return values

    def random_streams(self) -> dict[str, str]:
        """Hash each random stream of this process, without a draw."""
        torch = self.torch
        _, words, gauss = random.getstate()
        states = {"torch": torch.get_rng_state().numpy().tobytes(), "python": repr((hash(words), gauss)).encode()}
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            _, words, *rest = numpy.random.get_state()
            states["numpy"] = words.tobytes() + repr(rest).encode()
        if torch.cuda.is_initialized():
            devices = range(torch.cuda.device_count())
            states["cuda"] = b"".join(torch.cuda.get_rng_state(index).numpy().tobytes() for index in devices)
        return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}

    def _read(self, sums: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return numbers in place of tensors, read with one wait for each device."""
        groups: dict[tuple[Any, Any], list[tuple[str, int, Any]]] = {}
        numbers = {key: list(values) for key, values in sums.items()}
        for key, values in sums.items():
            for index, value in enumerate(values):
                if isinstance(value, self.torch.Tensor):
                    one = value.detach().reshape(-1)[0] if value.dim() else value.detach()
                    groups.setdefault((value.device, value.dtype), []).append((key, index, one))
        for places in groups.values():
            values = self.torch.stack([each[2] for each in places]).tolist()
            for (key, index, _), value in zip(places, values):
                numbers[key][index] = value
        return numbers

    def _name(self, optimizer: Any) -> str:
        """Name an optimizer by its class, the shapes of its parameters, and its number among equal ones."""
        name = self.optimizer_names.get(id(optimizer))
        if name is None:
            shapes = [tuple(each.shape) for each in parameters_of(optimizer)]
            name = f"{type(optimizer).__name__}-{digest(shapes)[:6]}"
            same = sum(each.split("#")[0] == name for each in self.optimizer_names.values())
            name = self.optimizer_names[id(optimizer)] = f"{name}#{same}" if same else name
        return name


def wrap(original: Any, function: Any) -> Any:
    """Return a function that calls another one with the original, under the name of the original."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return call


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def plain(torch: Any, tensor: Any) -> Any:
    """Return the dense local part of a tensor."""
    tensor = tensor.detach()
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def tensors_in(torch: Any, value: Any, is_deep: bool = False) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples and dicts, and where it is deep, in modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "values")):
        for each in value.values():
            yield from tensors_in(torch, each, is_deep)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(torch, each, is_deep)
    elif is_deep and isinstance(value, torch.nn.Module):
        yield from tensors_in(torch, value.state_dict(), is_deep)


def number(value: Any) -> Any:
    """Return a number that may be in a tensor."""
    return value.item() if hasattr(value, "item") else value


def _option(value: Any) -> Any:
    """Return an option of an optimizer in one form, as what is loaded may be a list for a tuple, or 1.0 for 1."""
    value = number(value)
    if isinstance(value, (list, tuple)):
        return [_option(each) for each in value]
    return float(value) if isinstance(value, int) else value


def digest(value: Any) -> str:
    """Return sixteen digits for a value, by its text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def fingerprints(sums: Iterable[int]) -> str:
    """Return eight digits for each tensor, by which the first one that differs is found."""
    return "".join(f"{(each * _GOLDEN >> 32) & 0xFFFFFFFF:08x}" for each in sums)
