"""Functions that a script without zae may need; their source is copied into it, so each is plain PyTorch by itself."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import math
import os
import random
import re
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

__all__ = ["OF_ZAE", "source_of"]

_MODULES = {"contextlib": contextlib, "json": json, "math": math, "os": os, "random": random, "time": time}
_LINES = {
    "np": "import numpy as np", "torch": "import torch", "dist": "import torch.distributed as dist",
    "DataLoader": "from torch.utils.data import DataLoader", **{name: f"import {name}" for name in _MODULES},
}  # fmt: skip


def source_of(name: str) -> tuple[str, set[str], list[str]]:
    """Return the source of a function, or class, of this file, the imports that it needs, and the others it uses."""
    text = inspect.getsource(getattr(sys.modules[__name__], name))
    text = re.sub(r"(?<=\w): Any\b|(?<=\)) -> [^:\n]+(?=:)", "", text)  # Without the types: they are all Any.
    names = {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
    own = [each for each in ORDER if each in names and each != name]
    return text.strip("\n"), {_LINES[each] for each in names if each in _LINES}, own


def warm_up_then(shape: Any, warmup: Any, decay: Any, final: Any, total_steps: Any) -> Any:
    """Return a factory of schedules: a linear warm-up, and a function of the optimizer steps after it."""

    def make(optimizer: Any, total_steps: Any = total_steps) -> Any:
        steps = [round(n * total_steps) if isinstance(n, float) else n for n in (warmup, decay)]

        def factor(step: Any) -> Any:
            if step < steps[0]:
                return step / steps[0]
            if shape == "inverse_sqrt":
                timescale = steps[0] or 10_000
                return math.sqrt(timescale / (timescale + step - steps[0]))
            start = total_steps - steps[1] if shape == "wsd" else steps[0]
            if step < start or start == total_steps:
                return 1.0
            share = min(1.0, (step - start) / (total_steps - start))
            left = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "wsd": 1 - math.sqrt(share)}
            return final + (1 - final) * left[shape]

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    return make


def cosine(*, warmup: Any = 0.05, final: Any = 0.0, total_steps: Any = None) -> Any:
    """Warm up, then lower the rate along half a cosine."""
    return warm_up_then("cosine", warmup, 0, final, total_steps)


def linear(*, warmup: Any = 0.05, final: Any = 0.0, total_steps: Any = None) -> Any:
    """Warm up, then lower the rate linearly."""
    return warm_up_then("linear", warmup, 0, final, total_steps)


def inverse_sqrt(*, warmup: Any = 0.05, total_steps: Any = None) -> Any:
    """Warm up, then lower the rate by the inverse square root of the steps."""
    return warm_up_then("inverse_sqrt", warmup, 0, 0.0, total_steps)


def wsd(*, warmup: Any = 0.05, decay: Any = 0.2, final: Any = 0.0, total_steps: Any = None) -> Any:
    """Warm up, keep the rate, and lower it in the last part of the run."""
    return warm_up_then("wsd", warmup, decay, final, total_steps)


def seed_everything(seed: Any) -> Any:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def to_device(batch: Any, device: Any) -> Any:
    """Move the tensors of a batch to a device."""
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch


def samples_in(batch: Any) -> Any:
    """Return the number of samples of a batch: the length of its first tensor."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        counts = [samples_in(each) for each in batch]
        return next((count for count in counts if count), 0)
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() else 0


class Means:
    """Means of the numbers that steps return, each batch with its weight."""

    def __init__(self) -> None:
        self.sums: Any = {}

    def add(self, out: Any, weight: Any) -> None:
        for key, value in out.items():
            value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(value, (int, float)) and key != "num_targets":
                total, weights = self.sums.get(key, (0.0, 0.0))
                self.sums[key] = total + value * weight, weights + weight

    def result(self) -> Any:
        return {key: total / weights for key, (total, weights) in self.sums.items()}


def random_streams() -> Any:
    """Return the states of the random streams of this process."""
    state: Any = np.random.get_state()
    name, key, *rest = state
    return {"python": random.getstate(), "numpy": (name, key.tolist(), *rest), "torch": torch.get_rng_state()}


def set_random_streams(streams: Any) -> Any:
    """Put the random streams back to states of `random_streams`."""
    random.setstate(streams["python"])
    name, key, *rest = streams["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))
    torch.set_rng_state(streams["torch"])


def streams_of(loader: Any) -> Any:
    """Return the states of the random streams of this process and of a loader."""
    generator: Any = getattr(loader, "generator", None)
    return {**random_streams(), "loader": None if generator is None else generator.get_state()}


def set_streams_of(loader: Any, streams: Any) -> Any:
    """Put the random streams back to states of `streams_of`."""
    set_random_streams(streams)
    if streams["loader"] is not None:
        loader.generator.set_state(streams["loader"])


@contextlib.contextmanager
def apart_from_training(model: Any, loader: Any) -> Any:
    """Evaluate: without gradients, in evaluation mode, and without a change to training's random streams."""
    streams, training = random_streams(), [module for module in model.modules() if module.training]
    generator: Any = getattr(loader, "generator", None)
    state = None if generator is None else generator.get_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        set_random_streams(streams)
        if generator is not None:
            generator.set_state(state)


def update_average(average: Any, model: Any, decay: Any) -> Any:
    """Update an average of the weights: decay * average + (1 - decay) * weights; buffers are copied."""
    values, parameters = model.state_dict(), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for key, mean in average.items():
            if key in parameters and mean.is_floating_point():
                mean.mul_(decay).add_(values[key], alpha=1 - decay)
            else:
                mean.copy_(values[key])


def copy_of_weights(model: Any) -> Any:
    """Return a copy of the weights and buffers of a model."""
    values = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {key: value.detach().clone() for key, value in values.items()}


def start_of_average(model: Any) -> Any:
    """Return a copy of the weights and buffers of a model, with weights in half precision in float32."""
    parameters, low = (
        {name for name, _ in model.named_parameters(remove_duplicate=False)},
        (torch.bfloat16, torch.float16),
    )
    values = copy_of_weights(model)
    return {key: each.float() if key in parameters and each.dtype in low else each for key, each in values.items()}


def to_bfloat16(model: Any) -> Any:
    """Convert the parameters of a model to bfloat16; norms and parametrizations are in float32."""
    norms = ("BatchNorm", "InstanceNorm", "LayerNorm", "GroupNorm", "ParametrizationList")
    for module in model.modules():
        of_torch = [each.__name__ for each in type(module).__mro__ if each.__module__.startswith("torch.nn")]
        is_norm = any(name in each for name in norms for each in of_torch)
        for tensor in (*module.parameters(recurse=False), *(module.buffers(recurse=False) if is_norm else ())):
            if tensor.is_floating_point() and type(tensor.data) is torch.Tensor:
                tensor.data = tensor.data.to(torch.float32 if is_norm else torch.bfloat16)


class Float32Weights:
    """Float32 copies of the parameters in bfloat16, which an optimizer steps in their place."""

    def __init__(self, optimizer: Any) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"] if each.dtype == torch.bfloat16]
        self.pairs = [(each, torch.nn.Parameter(each.detach().float())) for each in held]
        copies = dict(self.pairs)
        for group in optimizer.param_groups:
            group["params"] = [copies.get(each, each) for each in group["params"]]
        for each in [each for each in optimizer.state if each in copies]:
            optimizer.state[copies[each]] = optimizer.state.pop(each)

    def take_gradients(self) -> None:
        for parameter, weights in self.pairs:
            weights.grad = None if parameter.grad is None else parameter.grad.float()

    def round(self) -> None:
        with torch.no_grad():
            for parameter, weights in self.pairs:
                parameter.copy_(weights)

    def state_dict(self) -> Any:
        return {str(index): weights.detach() for index, (_, weights) in enumerate(self.pairs)}

    def load_state_dict(self, state: Any) -> None:
        with torch.no_grad():
            for index, (_, weights) in enumerate(self.pairs):
                weights.copy_(state[str(index)])


@contextlib.contextmanager
def weights_of(average: Any, model: Any) -> Any:
    """Put an average into the model for the block."""
    kept = copy_of_weights(model)
    model.load_state_dict(average, strict=False)
    try:
        yield
    finally:
        model.load_state_dict(kept, strict=False)


def losses_in(loss: Any) -> Any:
    """Return the losses of a step: one, or one for each optimizer."""
    return list(loss.values()) if isinstance(loss, dict) else [loss]


def backward_each(losses: Any, optimizers: Any, scale: Any = lambda loss: loss) -> Any:
    """Differentiate one loss, or each of several by the parameters of the optimizer of its name."""
    if not isinstance(losses, dict):
        scale(losses).backward()
        return
    last = list(losses)[-1]
    for name, loss in losses.items():
        groups = optimizers[name].param_groups
        inputs = [p for group in groups for p in group["params"] if p.requires_grad]
        scale(loss).backward(inputs=inputs, retain_graph=name != last)


def parameters_of(optimizer: Any, model: Any) -> Any:
    """Return the parameters of an optimizer, in the order of the model: the sum of a norm depends on it."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ordered, ids = list(model.parameters()), set(map(id, held))
    own = set(map(id, ordered))
    return [p for p in ordered if id(p) in ids] + [p for p in held if id(p) not in own]


def rates_of(optimizers: Any) -> Any:
    """Return the learning rates of optimizers, by name."""
    rates = {}
    for name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            parts = ["lr", *([name] if len(optimizers) > 1 else []), *([str(index)] if index else [])]
            rates["/".join(parts)] = float(group["lr"])
    return rates


def write_line(path: Any, **record: Any) -> Any:
    """Append a record to a file of JSON lines."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({**record, "unix_time": time.time()}) + "\n")


def save(state: Any, path: Any) -> Any:
    """Save a state whole or not at all."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


class SharedSteps:
    """A batch sampler: of the samples of each step, every n-th for this rank, in the order that rank 0 draws."""

    def __init__(self, batches: Any) -> None:
        self.sampler, self.size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        rest = len(self.sampler) % (self.size * self.ranks)
        if 0 < rest < self.ranks and not self.drop_last:
            raise ValueError(f"the last step has {rest} samples for {self.ranks} ranks; use drop_last=True")

    def __len__(self) -> int:
        together = self.size * self.ranks
        return len(self.sampler) // together if self.drop_last else -(-len(self.sampler) // together)

    def __iter__(self) -> Any:
        drawn: Any = [list(self.sampler) if self.rank == 0 else None]
        dist.broadcast_object_list(drawn)
        own = drawn[0][self.rank :: self.ranks]
        for step in range(len(self)):
            yield own[step * self.size : (step + 1) * self.size]

    def factors(self) -> Any:
        """Yield a factor for the loss of each step, so that each sample has the same weight in a short last step."""
        for step in range(len(self)):
            together = min(self.size * self.ranks, len(self.sampler) - step * self.size * self.ranks)
            yield len(range(self.rank, together, self.ranks)) * self.ranks / together


class SharedBatches:
    """A batch sampler: every n-th batch for this rank, in the order that rank 0 draws."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.rank, self.ranks = batches, dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return len(range(self.rank, len(self.batches), self.ranks))

    def __iter__(self) -> Any:
        drawn: Any = [list(self.batches) if self.rank == 0 else None]
        dist.broadcast_object_list(drawn)
        yield from drawn[0][self.rank :: self.ranks]


def with_batches(loader: Any, batches: Any) -> Any:
    """Return a loader with another batch sampler."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["generator", "prefetch_factor", "persistent_workers"]
    return DataLoader(loader.dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in names})


def send_buffers(model: Any) -> Any:
    """Give each rank the buffers of rank 0."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def of_all_ranks(value: Any) -> Any:
    """Return the values of all ranks."""
    values: Any = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def over_ranks(means: Any) -> Any:
    """Return means over the batches of all ranks."""
    found = Means()
    for sums in of_all_ranks(means.sums):
        for key, (total, weight) in sums.items():
            other, weights = found.sums.get(key, (0.0, 0.0))
            found.sums[key] = other + total, weights + weight
    return found


OF_ZAE = ("cosine", "inverse_sqrt", "linear", "seed_everything", "wsd")
"""Those that are public in zae too, under the same names."""

ORDER = [name for name, value in list(globals().items()) if getattr(value, "__module__", "") == __name__]
"""The functions of this file."""
