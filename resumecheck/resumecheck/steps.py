"""Record what each optimizer step of this process depends on and what it does, as one row of hashes.

It runs in the process that trains: torch is given. Of weights 64-bit words are summed, so that any flipped bit changes
the sum. Of a tensor of more than 64 KB, each eighth block of 2 KB is summed, as what costs is to read it all. A change
of 16 KB in a row is always seen at once. A smaller one between the blocks is seen by what it does: if the loss depends
on it, the next update of all weights is another one. At the first step, and at the first one after each save, all words
of the weights and of the state of the optimizer are summed: a resumed run begins with these. So are all words of
inputs, multiplied by their places, as their order counts. Sums are made on the device of the tensor, and those of a
step are read at once.
"""

from __future__ import annotations

import functools
import importlib
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .hashes import digest, ordered_sum, random_streams, read

__all__ = ["Recorder", "fingerprints", "wrap"]

_MAX_WORDS = 8192  # Of a longer weight, one block in so many is summed.
_BLOCK, _EVERY = 256, 8
_NO_VIEW: tuple[Any, int, Any] = None, 0, None
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
    before_step : callable, optional
        Is called before each step of an optimizer, or each backward.
    """

    def __init__(
        self,
        torch: Any,
        write: Callable[[Row], None],
        by: str = "optimizer",
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.torch, self.write, self.by, self.call_before_step = torch, write, by, before_step
        self.begin_process()
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        torch.nn.Module.compile = wrap(torch.nn.Module.compile, self.compile)
        torch.Tensor.backward = wrap(torch.Tensor.backward, self.backward)
        optimizers.Optimizer.state_dict = wrap(optimizers.Optimizer.state_dict, self.save_state)
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
        self.optimizers: dict[str, weakref.ref[Any]] = {}
        self.optimizer_names: dict[int, str] = {}
        self.saved_states: dict[str, list[Any]] = {}
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
        self.saved_random: dict[str, str] | None = None
        self.scale: Any = None
        self.is_shuffled = self.is_new_epoch = False
        self.models: dict[int, Any] = {}

    # --- steps

    def before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Hash what an optimizer begins with."""
        self.call_before_step()
        if self._is_captured():
            return
        name, weights = self._name(optimizer), parameters_of(optimizer)
        start: dict[str, Any] = {}
        saved = self.saved_states.pop(name, None)
        if name not in self.versions:
            start["state_before"] = self._state_of(optimizer)
        elif saved is not None:
            start["state_before"] = saved
        if "state_before" in start:  # All words of what a resumed run begins with.
            start["words_before"] = [ordered_sum(weight) for weight in weights]
        if self.versions.get(name) != [
            weight._version for weight in weights
        ]:  # Else they are those after the step before.
            start["before"] = self.sums(weights)
        self.starts.append(start)

    def after_step(self, optimizer: Any, args: Any = (), kwargs: Any = None, skipped: bool = False) -> None:
        """Write the row of a step."""
        if self._is_captured():
            return
        weights = parameters_of(optimizer)
        groups = [{k: group[k] for k in optimizer.defaults if k in group} for group in optimizer.param_groups]
        self._write_row(self._name(optimizer), weights, self.starts.pop(), groups, skipped)

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
        skipped: bool = False,
    ) -> None:
        is_first = name not in self.versions
        models = [model for reference in self.models.values() if (model := reference()) is not None]
        sums = {**start, "after": self.sums(weights), "inputs": self.inputs, "batches": self.batches}
        sums["buffers"] = self.sums([buffer for model in models for buffer in model.buffers()])
        sums["loss"] = self.losses
        sums["scale"] = [] if self.scale is None else [self.scale]
        if is_first:
            trained = {id(weight) for weight in weights}
            frozen = [parameter for model in models for parameter in model.parameters() if not parameter.requires_grad]
            sums["frozen"] = self.sums([weight for weight in frozen if id(weight) not in trained])
        values = iter(read([weight for some in sums.values() for weight in some]))
        numbers = {key: [next(values) for _ in some] for key, some in sums.items()}
        if not (self.losses or self.inputs) and numbers.get("before") == numbers["after"]:
            return  # torch.distributed.checkpoint steps with zeros, to make the state into which it loads.
        if is_first:
            names = [self.parameter_names.get(id(weight), f"parameter {index}") for index, weight in enumerate(weights)]
            size = sum(weight.numel() * weight.element_size() for weight in weights)
            self.write({"kind": "optimizer", "optimizer": name, "names": names, "bytes": size})
        self.count += 1
        row: Row = {"kind": "step", "n": self.count, "optimizer": name, "skipped": skipped}
        row.update({key: digest(value) for key, value in numbers.items() if key not in ("loss", "scale")})
        row["inputs"] = fingerprints(numbers["inputs"])
        row["buffers"] = digest(sorted(numbers["buffers"]))
        row.setdefault("before", self.weights_after.get(name, ""))
        row["unchanged"] = row["before"] == row["after"] and not any(map(_may_change_between_blocks, weights))
        row["parts"] = fingerprints(numbers["after"])
        if is_first:
            row["parts_before"] = fingerprints(numbers["before"])
            row["restored"] = self.restored
        row["loss"], row["scale"] = [number(loss) for loss in numbers["loss"]], numbers["scale"]
        row["lr"] = [number(group.get("lr")) for group in groups]
        row["options"] = digest([sorted((key, _option(value)) for key, value in group.items()) for group in groups])
        row["random"], row["saved_random"] = self.random or random_streams(), self.saved_random
        row["shapes"], row["seen"] = digest(self.shapes), len(self.inputs)
        row["shuffled"], row["new_epoch"] = self.is_shuffled, self.is_new_epoch
        self.weights_after[name], self.versions[name] = row["after"], [weight._version for weight in weights]
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
                self.random = random_streams()

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Hash the inputs of the outermost module: the tensors that are no results of others."""
        if self.torch.compiler.is_compiling() or module is not self.root:
            return
        self.root = None
        self.models.setdefault(id(module), weakref.ref(module))
        if id(module) not in self.named_models:
            self.named_models.add(id(module))
            for name, parameter in module.named_parameters():
                self.parameter_names.setdefault(id(parameter), name)
        for tensor in tensors_in(self.torch, (args, kwargs)):
            if not tensor.requires_grad:
                self.shapes.append((str(tensor.dtype), tuple(tensor.shape)))
                self.inputs.append(ordered_sum(tensor))

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
        if self.by == "backward":
            self.call_before_step()
        self.losses.append(tensor.detach().reshape(-1)[0])
        result = original(tensor, *args, **kwargs)
        if self.by == "backward":
            models = [model for reference in self.models.values() if (model := reference()) is not None]
            # Once each: a second model of the same weights, which has built the first, may be gone in the next step.
            parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
            weights = [parameter for parameter in parameters.values() if parameter.requires_grad]
            start: dict[str, Any] = {"before": self.sums(weights)}
            self._write_row("backward", weights, start, [])
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
            self.batches += [ordered_sum(tensor) for tensor in tensors_in(self.torch, batch)]
        return batch

    def restore_random(self, stream: str) -> Callable[..., Any]:
        """Note to what a stream was set before the first step."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self.count:
                self.restored[stream] = random_streams()[stream]
            return result

        return call

    # --- sums

    def fingerprints_in(self, value: Any) -> str:
        """Return the fingerprints of the tensors in an object that is saved."""
        return fingerprints(read([self._sum(tensor) for tensor in tensors_in(self.torch, value, is_deep=True)]))

    def sums(self, tensors: Iterable[Any]) -> list[Any]:
        """Sum the words of each tensor; what prepares a sum of a tensor that lives on is done once."""
        totals = []
        for present in tensors:
            tensor, place, view = self.views.get(id(present), _NO_VIEW)
            is_prepared = tensor is not None and tensor() is present and present.data_ptr() == place
            totals.append(view.sum() if is_prepared else self._sum(present))
        return totals

    def _sum(self, tensor: Any) -> Any:
        """Sum a tensor as 64-bit words, or where it does not fill them, as integers of its own size."""
        torch = self.torch
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
            return ordered_sum(tensor)
        data = tensor.detach()
        if hasattr(data, "to_local"):
            data = data.to_local()
        data = torch.view_as_real(data) if data.is_complex() else data
        flat, ratio = data.contiguous().reshape(-1), 8 // data.element_size()
        if flat.numel() % ratio:
            words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[data.element_size()])
        else:
            words = (flat.clone() if flat.storage_offset() % ratio else flat).view(torch.int64)
        if words.numel() > _MAX_WORDS:
            words = words.unfold(0, _BLOCK, _EVERY * _BLOCK)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and words.data_ptr() == tensor.data_ptr():
            gone = functools.partial(lambda key, _: self.views.pop(key, None), id(tensor))
            self.views[id(tensor)] = weakref.ref(tensor, gone), words.data_ptr(), words
        return words.sum()

    def save_state(self, original: Any, optimizer: Any) -> Any:
        """Note the state that is saved: a resumed run begins with it."""
        result = original(optimizer)
        if id(optimizer) in self.optimizer_names:
            self.note_state(optimizer)
        return result

    def note_states(self) -> None:
        """Note the random state and that of each optimizer, as files are written that may hold them."""
        self.saved_random = self.saved_random or random_streams()
        for reference in self.optimizers.values():
            if (optimizer := reference()) is not None:
                self.note_state(optimizer)

    def note_state(self, optimizer: Any) -> None:
        """Sum a state that is saved, once between two steps."""
        name = self._name(optimizer)
        if name not in self.saved_states:
            self.saved_states[name] = self._state_of(optimizer)

    def _state_of(self, optimizer: Any) -> list[Any]:
        """Sum the tensors of the state of an optimizer; of all else there is the text."""
        values: list[Any] = []
        for parameter in parameters_of(optimizer):
            state = optimizer.state.get(parameter) or {}
            for key in sorted(state, key=str):
                value = state[key]
                if isinstance(value, self.torch.Tensor):
                    values.append(ordered_sum(value))
                elif value is not None and not callable(value):
                    values.append(f"{key}={value!r:.200}")
        return values

    def _name(self, optimizer: Any) -> str:
        """Name an optimizer by its class, the shapes of its parameters, and its number among equal ones."""
        name = self.optimizer_names.get(id(optimizer))
        if name is None:
            shapes = [tuple(parameter.shape) for parameter in parameters_of(optimizer)]
            name = f"{type(optimizer).__name__}-{digest(shapes)[:6]}"
            same = sum(other_name.split("#")[0] == name for other_name in self.optimizer_names.values())
            name = self.optimizer_names[id(optimizer)] = f"{name}#{same}" if same else name
            self.optimizers[name] = weakref.ref(optimizer)
        return name


def wrap(original: Any, function: Any) -> Any:
    """Return a function that calls another one with the original, under the name of the original."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return call


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_in(torch: Any, value: Any, is_deep: bool = False) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples and dicts, and where it is deep, in modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "values")):
        for entry in value.values():
            yield from tensors_in(torch, entry, is_deep)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(torch, entry, is_deep)
    elif is_deep and isinstance(value, torch.nn.Module):
        yield from tensors_in(torch, value.state_dict(), is_deep)


def _may_change_between_blocks(weight: Any) -> bool:
    """Return whether a step changes a weight that is summed in part, such as a row of a table: its gradient says so."""
    is_summed_in_part = weight.numel() * weight.element_size() > 8 * _MAX_WORDS
    return is_summed_in_part and weight.grad is not None and bool(number(ordered_sum(weight.grad)))


def number(value: Any) -> Any:
    """Return a number that may be in a tensor."""
    return value.item() if hasattr(value, "item") else value


def _option(value: Any) -> Any:
    """Return an option of an optimizer in one form, as what is loaded may be a list for a tuple, or 1.0 for 1."""
    value = number(value)
    if isinstance(value, (list, tuple)):
        return [_option(entry) for entry in value]
    return float(value) if isinstance(value, int) else value


def fingerprints(sums: Iterable[int]) -> str:
    """Return eight digits for each tensor, by which the first one that differs is found."""
    return "".join(f"{(number * _GOLDEN >> 32) & 0xFFFFFFFF:08x}" for number in sums)
