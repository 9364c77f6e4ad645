"""Tensors whose parts lie on several ranks (DTensor): gather them, shard whole ones, compute norms over them.

`forward_keeps_weights` and `DrawsWatch` refuse what a step must not do with such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from zae.distributed.collectives import all_reduce
from zae.errors import ConfigError, DistributedError
from zae.values.walk import has_same_bits, is_sharded, local_part, map_tensors, redistribute_like, tensors_in

__all__ = [
    "DrawsWatch",
    "by_part",
    "check_held",
    "check_used",
    "explain_parts",
    "forward_keeps_weights",
    "gradient_norm",
    "local_gradients",
    "name_of_part",
    "part_of",
    "replace_parameters",
]

_SHOWN = 10
_COMPARED = 16  # Steps in all of which ranks compare which parameters have gradients.
_EXPLAINED = {
    "mixed torch.Tensor and DTensor": "gathers parameters for the forward of the model. Where a step calls another "
    "method of it, self.model.encode(inputs), write fsdp_methods=['encode']; where the forward calls that method too, "
    "let both call a third one. Where a step calls a part of the model, or computes with parameters, as for a penalty, "
    "do that in the forward of the model",
    "storage of size 0": "has freed the blocks that a gradient of gradients needs; train with MultiGPUAddon",
    "appears to not have been used in the graph": "computes with gathered blocks, not with what parameters() returns; "
    "read the .grad of each parameter in clip(), or train with MultiGPUAddon",
    "uniform original parameter dtype": "gathers the parameters of a block together, which must have one dtype; "
    "convert the model, or name modules of one dtype each in fsdp_blocks",
    "non-contiguous parameters": "divides parameters that are contiguous in memory; call "
    "model.to(memory_format=torch.contiguous_format), or contiguous() of their data",
    "FSDP does not support deepcopy": "has divided the model, which cannot be copied then; copy it before run()",
    "in-place operations that require placement changes": "lets each rank hold a part of a parameter, which this "
    "operation needs whole. If it is of the optimizer, take another one, as AdamW or SGD, or train with MultiGPUAddon",
}


def check_used(named: Mapping[str, Tensor], step: int, gather: Callable[[Any], list[Any]]) -> None:
    """Refuse gradients of other parameters on one rank than on another; all ranks call it.

    The gradients of a block are averaged as one tensor: those of different parameters of one shape are added to each
    other, and no exchange fails. Ranks compare in the first steps, and then ever more rarely.
    """
    if step >= _COMPARED and step & (step - 1):
        return
    used_names = gather([name for name, parameter in named.items() if parameter.grad is not None])
    for rank, names in enumerate(used_names):
        if names != used_names[0]:
            raise DistributedError(
                "ranks have gradients of different parameters: share 0 of the data has "
                f"{_names_beyond(used_names[0], names)}, and share {rank} has {_names_beyond(names, used_names[0])}. "
                "Sharded gradients are averaged block by block, so that those of one parameter would come into another "
                "one. Call all parts of the model on every rank, and multiply what is not wanted by 0; or train with "
                "MultiGPUAddon and find_unused_parameters=True"
            )


def _names_beyond(names: Sequence[str], others: Sequence[str]) -> str:
    """Return those of the names that are not among the others, as text."""
    only = [name for name in names if name not in others]
    return ", ".join(only[:_SHOWN]) or "none that the other has not"


def part_of(tensor: Any) -> str:
    """Name the part of a tensor that this rank holds, as only ranks with the same part do; "" for a whole tensor."""
    if not is_sharded(tensor):
        return ""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    names = mesh.mesh_dim_names or [f"dimension {axis}" for axis in range(mesh.ndim)]
    divided = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return ", ".join(f"{names[axis]} {place[axis]}" for axis in divided)


def name_of_part(name: str, tensor: Any) -> str:
    """Return a name that only ranks with the same part of a tensor give it."""
    part = part_of(tensor)
    return f"{name} (part {part})" if part else name


def by_part(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Group tensors by the part that this rank holds of them."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(part_of(tensor), []).append(tensor)
    return groups


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of gradients in any layouts: local squares, summed over the dimensions that divide them."""
    squares_over: dict[tuple[Any, ...], list[Tensor]] = {}  # By the process groups that divide the gradient.
    dtypes = []
    for gradient in gradients:
        dtypes.append(gradient.dtype)
        groups, local = _dimensions_of(gradient) if is_sharded(gradient) else ((), gradient)
        squares_over.setdefault(groups, []).append(torch.linalg.vector_norm(local).double().square())
    if not dtypes:
        return torch.tensor(0.0)
    total: Any = 0.0
    for groups, squares in squares_over.items():  # In the order of the parameters, which is the same on every rank.
        square = torch.stack(squares).sum()
        for group in groups:
            # Each rank of the group has squared its own part; their sum is that of the whole gradient.
            all_reduce(square, group)
        total = total + square
    norm: Tensor = total.sqrt().to(max(dtypes, key=lambda dtype: torch.finfo(dtype).bits))
    return norm


def local_gradients(parameters: Iterable[Tensor]) -> list[Any]:
    """Return objects whose ``grad`` is this rank's part: kernels for parts on a mesh take seconds to be chosen."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [SimpleNamespace(grad=local_part(tensor)) for tensor in gradients]


def _dimensions_of(gradient: Any) -> tuple[tuple[Any, ...], Tensor]:
    """Return the process groups over which a gradient is divided, and this rank's part of it."""
    from torch.distributed.tensor import Replicate

    if any(place.is_partial() for place in gradient.placements):
        places = [Replicate() if place.is_partial() else place for place in gradient.placements]
        gradient = gradient.redistribute(placements=places)
    mesh = gradient.device_mesh
    groups = [mesh.get_group(i) for i, place in enumerate(gradient.placements) if not place.is_replicate()]
    return tuple(groups), gradient.to_local()


def replace_parameters(optimizer: Optimizer, present: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Let an optimizer hold other parameters, with the state that it has of the old ones.

    Parameters
    ----------
    optimizer : Optimizer
        Changed in place: its groups stay the same objects.
    present : mapping
        The old and the new parameter by the id of the old one.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [
            present[id(parameter)][1] if id(parameter) in present else parameter for parameter in group["params"]
        ]
    for old in [parameter for parameter in optimizer.state if id(parameter) in present]:
        new = present[id(old)][1]
        state = optimizer.state.pop(old)
        optimizer.state[new] = map_tensors(partial(redistribute_like, reference=new), state)


def check_held(model: nn.Module, sharded: Mapping[str, Tensor]) -> None:
    """Refuse parameters other than those that were sharded: a forward would still gather the former ones."""
    present = dict(model.named_parameters())
    if names := [name for name in {**sharded, **present} if sharded.get(name) is not present.get(name)]:
        raise ConfigError(
            f"{', '.join(names[:_SHOWN])} was replaced, added or removed after the model was sharded, and the forward "
            "would not use the new one. Change weights in place, `with torch.no_grad(): parameter.mul_(0.5)`, and "
            "layers before run()"
        )


def explain_parts(error: BaseException) -> None:
    """Note beside an error of torch what FSDPAddon has to do with it, and what to write instead."""
    for words, note in _EXPLAINED.items():
        if words in str(error):
            error.add_note(f"zae: FSDPAddon {note}")


@contextmanager
def forward_keeps_weights(model: nn.Module, parts: Mapping[str, Tensor], inner: Any) -> Iterator[None]:
    """Refuse a forward that changes weights: those of a gathered block are dropped after it."""
    check_held(model, parts)
    names = {(id(holder), key): name for name, holder, key in _places(model)}

    def check(module: nn.Module, *_: Any) -> None:
        for key, parameter in module._parameters.items():
            part = parts.get(name := names.get((id(module), key), ""))
            if parameter is None or part is None or is_sharded(parameter):
                continue
            shard = local_part(redistribute_like(parameter.detach(), part))
            if not has_same_bits(shard, local_part(part).detach().to(shard.dtype)):
                raise ConfigError(
                    f"the forward of {type(module).__name__.removeprefix('FSDP')} changes its parameter {name}, which "
                    "is gathered for it and dropped afterwards: the change would be lost. Compute with a changed copy "
                    "instead (torch.nn.utils.parametrize), or change parameters in on_step_end of the trainer"
                )

    hook = module_hooks.register_module_forward_hook(check)
    try:
        with inner:
            yield
    finally:
        hook.remove()


class DrawsWatch(TorchFunctionMode):
    """Refuses functions that draw random numbers and take tensors of which each rank has another part.

    So it does gradients of gradients, which torch computes wrongly through such layers.
    """

    def __init__(self, device: torch.device, is_same: Callable[[Any], bool]) -> None:
        super().__init__()
        self._device = device
        self._is_same = is_same  # Whether the ranks have the same tensors; all of them ask.

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.autograd.grad and (kwargs or {}).get("create_graph"):
            raise ConfigError(
                "train_step differentiates gradients (create_graph=True), which torch computes wrongly through layers "
                "in parts, without an error; leave the penalty out, or train with MultiGPUAddon"
            )
        before = self._stream()
        result = function(*args, **(kwargs or {}))
        if self._stream() != before:
            arguments = [*tensors_in((args, kwargs))]
            if any(map(_is_in_parts, arguments)) or not self._is_same(arguments):
                raise ConfigError(
                    f"{function.__name__} draws random numbers for an activation of which each rank has another part: "
                    "they would not be those of one process. Move it behind the layer that ends the division "
                    "(RowwiseParallel), or set its p to 0"
                )
        return result

    def _stream(self) -> Any:
        """Return the state of the random streams in a comparable form."""
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(getattr(torch, self._device.type).get_rng_state(self._device))
        return [state.numpy().tobytes() for state in states]


def _is_in_parts(tensor: Tensor) -> bool:
    """Return whether each rank has another part of a tensor."""
    return any(not place.is_replicate() for place in getattr(tensor, "placements", ()))


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in model.named_modules():
        for key in module._parameters:
            yield f"{path}.{key}" if path else key, module, key
