"""Compare a model on a divided sequence with the same on all of it, with the first positions of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zae.common import random_state
from zae.common.torch_private import flatten_tree
from zae.common.walk import has_same_bits, is_sharded, local_part, map_tensors, tensors_in
from zae.errors import ConfigError, DistributedError
from zae.launch.context.arguments import check_leaves, put
from zae.launch.shards import DrawsWatch

if TYPE_CHECKING:
    from zae.launch.context.division import Division
    from zae.launch.context.model import DividedModel

__all__ = ["Check", "Layout"]

_CHUNK = 11  # Positions of a chunk, of which a rank has two.
_BYTES = 2**28  # Of gradients that are held at once.
_SHOWN = 5
_MIXING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.RNNBase, nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.GroupNorm, nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.Flatten,
    nn.MultiheadAttention,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The structure of what a model returns, and the dimension of the sequence of each tensor in it."""

    spec: Any
    dims: list[int | None]


class Check:
    """What was found of a model, for each way in which it is called.

    A call that was not seen since `begin` is made twice with a short part of its sequence: whole, and divided. The
    outputs, the gradients of a fixed function of them, and the buffers must be the same.
    """

    def __init__(self, owner: DividedModel) -> None:
        self._owner = owner
        self._layouts: dict[Any, Layout] = {}
        self.device: torch.device | None = None
        self.last: bool = True  # Whether gradients of this micro-batch are brought together.
        self.is_first = True  # Whether the window has no gradients yet.

    def begin(self) -> None:
        """Check the next calls."""
        self._layouts.clear()

    def layout_of(self, bound: inspect.BoundArguments, arguments: Mapping[str, Any]) -> Layout:
        """Return how the outputs of a call lie on the ranks."""
        leaves, spec = flatten_tree(dict(bound.arguments))
        kinds = [(each.dtype, each.dim()) if isinstance(each, Tensor) else type(each) for each in leaves]
        modes = self._owner.model.training, torch.is_grad_enabled()
        key = (modes, str(spec), tuple(kinds), tuple(arguments))
        ranks = self._owner.ranks
        ranks.compares = key not in self._layouts and modes[1]
        if key not in self._layouts:
            self._compare_inputs(bound)
            compares, ranks.compares = ranks.compares, False
            self._layouts[key] = self._look(bound, arguments)
            ranks.compares = compares
        return self._layouts[key]

    def _compare_inputs(self, bound: inspect.BoundArguments) -> None:
        if not self._owner.ranks.have_same(tensors_in(bound.arguments)):
            raise DistributedError(
                f"rank {dist.get_rank()} calls the model with another batch than the ranks that divide its sequence. "
                "Let the loader depend on data_rank and data_size of the trainer, not on the rank, and draw from "
                "torch, numpy.random or random, whose streams these ranks share"
            )

    def _look(self, bound: inspect.BoundArguments, arguments: Mapping[str, Any]) -> Layout:
        owner, device = self._owner, next(tensors_in(arguments)).device
        short = inspect.BoundArguments(bound.signature, dict(bound.arguments))
        cut = {name: self._cut(name, value) for name, value in arguments.items()}
        for name, value in cut.items():
            put(short, name, value)
        buffers = [each for each in owner.model.buffers() if each.numel()]
        before = [each.clone() for each in buffers]
        grad = nullcontext() if torch.is_grad_enabled() else torch.no_grad()
        with random_state.isolated(), torch.autocast(device.type, enabled=False), grad:
            with random_state.isolated():
                whole = owner.plain(short)
            after = _exchange(buffers, before)
            watch = DrawsWatch(owner.model, device, self._is_same, "Set its p to 0, or draw in train_step")
            step: dict[int, Division] = {}
            try:
                with watch if torch.is_grad_enabled() else nullcontext():
                    output, first = owner.call_divided(short, cut, step)
            except RuntimeError as error:
                error.add_note(f"zae: {type(owner.model).__name__} fails with a part of the sequence. {self._remedy()}")
                raise
            changed = _exchange(buffers, before)
            found = _Comparison(self, whole, output, first, step)
            found.compare_buffers(owner.model, after, changed)
            found.compare_outputs()
            if torch.is_grad_enabled():
                found.compare_gradients(owner.model)
        told = next(filter(None, owner.ranks.gather_objects(found.told)), None)
        if told:
            raise ConfigError(f"{told}. {self._remedy()}")
        return found.layout

    def _cut(self, name: str, value: Any) -> Any:
        size = min(self._owner.length_of(name, value), 2 * self._owner.ranks.size * _CHUNK)
        for dim in self._owner.inputs[name]:
            value = map_tensors(lambda each, dim=dim: each.narrow(dim, 0, size), value)  # type: ignore[misc]
        return value

    def _is_same(self, values: Any) -> bool:
        return self._owner.ranks.have_same(tensors_in(values))

    def _remedy(self) -> str:
        """Say what a divided model may do, and which of its layers may do something else."""
        owner = self._owner
        mixing = [f"{name} ({type(each).__name__})" for name, each in owner.model.named_modules()
                  if isinstance(each, _MIXING)]  # fmt: skip
        more = f" Its layers that may: {', '.join(mixing[:_SHOWN])}." if mixing else ""
        names = list(inspect.signature(owner.model.forward).parameters)
        return (
            "Only torch.nn.functional.scaled_dot_product_attention, called as an attribute of its module and not "
            "imported from it, may bring positions together: not convolutions, sums, means or norms over them, nor "
            f"attention of other functions.{more} Give the model the positions of its inputs instead of counting them "
            "in it: name the parameter that takes them, "
            f"context_positions='position_ids', or, as with all inputs that have a sequence, write context_inputs="
            f"{{{names[0] if names else 'tokens'!r}: 1, 'position_ids': 1}}. Or train without ContextParallelAddon"
        )


def _exchange(tensors: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Write values into tensors; return what was in them."""
    present = [each.clone() for each in tensors]
    with torch.no_grad():
        for tensor, value in zip(tensors, values):
            if not has_same_bits(tensor, value):
                tensor.copy_(value)
    return present


class _Comparison:
    """A call with all of a short sequence, and with parts of it."""

    def __init__(self, check: Check, whole: Any, output: Any, first: Division, step: Mapping[int, Division]) -> None:
        self._check, self._owner, self._first, self._step = check, check._owner, first, step
        self.told = ""
        self._kind = type(self._owner.model).__name__
        check_leaves(whole, f"what {self._kind} returns")
        self._whole, self._spec = flatten_tree(whole)
        self._own, spec = flatten_tree(output)
        self._dims: list[int | None] = []
        self._joined: list[Any] = []
        if spec != self._spec:
            self.told = f"{self._kind} returned {self._spec}, and {spec} for a part of the sequence"

    @property
    def layout(self) -> Layout:
        return Layout(self._spec, self._dims)

    def compare_buffers(self, model: nn.Module, after: list[Tensor], changed: list[Tensor]) -> None:
        """Refuse buffers that get values of a part of the sequence."""
        names = [name for name, each in model.named_buffers() if each.numel()]
        different = [name for name, one, other in zip(names, after, changed) if _distance(one, other) > _tolerance(one)]
        if different:
            self._tell(f"the forward of {self._kind} writes into {', '.join(different[:_SHOWN])} what depends on the "
                       "part of the sequence that a rank has")  # fmt: skip

    def compare_outputs(self) -> None:
        """Find the dimension of the sequence in each output, and compare what is gathered along it."""
        if self.told:
            self._dims = [None] * len(self._own)
            return
        for index, (one, own) in enumerate(zip(self._whole, self._own)):
            dim, joined = self._join(one, own, f"output {index} of {self._kind}")
            self._dims.append(dim)
            self._joined.append(joined)

    def _join(self, one: Any, own: Any, what: str) -> tuple[int | None, Any]:
        if not isinstance(one, Tensor) or not isinstance(own, Tensor):
            if one is not own and one != own:
                self._tell(f"{what} is {one!r}, and {own!r} for a part of the sequence")
            return None, own
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, own.shape)) if a != b]
        if one.dim() != own.dim() or len(differing) > 1:
            self._tell(f"{what} is of shape {tuple(one.shape)}, and {tuple(own.shape)} for a part of the sequence")
            return None, own
        dim, joined = differing[0] if differing else None, own
        if dim is not None:
            division = self._step.get(own.shape[dim])
            if division is None or division.length != one.shape[dim]:
                self._tell(f"{what} has {one.shape[dim]} entries along dimension {dim}, and {own.shape[dim]} for a "
                           "part of the sequence; it must have one for each position")  # fmt: skip
                return None, own
            joined = division.gather(own, dim, is_output=True)
        if _distance(one, joined) > _tolerance(one):
            place = "" if dim is None else f" from position {_first_difference(one, joined, dim)} on"
            self._tell(f"{what} is not the same with its sequence divided over {self._owner.ranks.size} ranks: by "
                       f"{_distance(one, joined):.2g} of its largest value{place}")  # fmt: skip
        return dim, joined

    def compare_gradients(self, model: nn.Module) -> None:
        """Compare the gradients of parameters: a layer may have no share in the outputs yet."""
        told = [bool(each) for each in self._owner.ranks.gather_objects(self.told)]
        losses = [] if any(told) else [_project(leaves) for leaves in (self._whole, self._joined)]
        if not losses or any(each is None for each in losses):
            return
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        with self._owner.differentiating(self._step):
            if any(map(is_sharded, named.values())):
                pairs: Iterable[Any] = self._of_shards(model, named, losses) if self._check.is_first else ()
            else:
                pairs = self._by_chunk(named, losses)
            found = {name: (_norm(one - other), _norm(one), one.dtype) for name, one, other in pairs}
        largest = max((norm for _, norm, _ in found.values()), default=0.0)
        ratios = {
            name: difference / max(norm, 0.1 * largest) / _by_type(dtype)
            for name, (difference, norm, dtype) in found.items() if largest
        }  # fmt: skip
        different = [name for name, ratio in ratios.items() if not ratio <= 1]
        if different:
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            self._tell(f"the gradients of {', '.join(different[:_SHOWN])}{more} in {self._kind} are not the same with "
                       f"the sequence divided over {self._owner.ranks.size} ranks")  # fmt: skip

    def _by_chunk(self, named: Mapping[str, Tensor], losses: list[Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the gradients of both, of some parameters at a time."""
        for names in _chunks(named):
            held = [named[name] for name in names]
            one, other = (torch.autograd.grad(loss, held, retain_graph=True, allow_unused=True) for loss in losses)
            for name, parameter, first, second in zip(names, held, one, other):
                pair = [torch.zeros_like(parameter) if each is None else each for each in (first, second)]
                mean = pair[1].to_dense().contiguous()
                dist.all_reduce(mean, group=self._owner.ranks.group)
                yield name, pair[0].to_dense(), mean.div_(self._owner.ranks.size)

    def _of_shards(
        self, model: Any, named: Mapping[str, Tensor], losses: list[Any]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield this rank's parts of the gradients of both; FSDP averages them over the ranks."""
        made = []
        model.set_requires_gradient_sync(True)
        try:
            for loss in losses:
                loss.backward()
                made.append({name: each.grad for name, each in named.items()})
                for each in named.values():
                    each.grad = None
        finally:
            model.set_requires_gradient_sync(self._check.last)
        for name, each in named.items():
            one, other = (found[name] for found in made)
            pair = [torch.zeros_like(each) if found is None else found for found in (one, other)]
            yield name, local_part(pair[0]), local_part(pair[1])

    def _tell(self, text: str) -> None:
        self.told = self.told or text


def _chunks(named: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, each in named.items():
        if names and size + each.nbytes > _BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += each.nbytes
    if names:
        yield names


def _project(leaves: Iterable[Any]) -> Tensor | None:
    """Return a fixed random sum of outputs, whose gradient reaches all of them."""
    generator = torch.Generator().manual_seed(0)
    total = None
    for each in leaves:
        if isinstance(each, Tensor) and each.is_floating_point():
            weights = torch.randn(each.shape, generator=generator).to(each.device, each.dtype)
            if each.requires_grad:
                total = (each * weights).sum() + (0 if total is None else total)
    return total


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double())) if tensor.numel() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, in parts of the largest value."""
    if not one.numel() or one.shape != other.shape:
        return 0.0 if one.shape == other.shape else 1.0
    if not (one.is_floating_point() or one.is_complex()):
        return float(not torch.equal(one, other))
    one, other = one.detach(), other.detach()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0, (one - other).abs()).max()
    finite = torch.where(one.isfinite(), one.abs(), 0).max()
    return float(difference.double() / finite.double().clamp(min=1e-30)) if float(difference) else 0.0


def _first_difference(one: Tensor, other: Tensor, dim: int) -> int:
    rows = (one.detach() - other.detach()).abs().movedim(dim, 0).flatten(1).amax(1).double()
    bad = rows > _tolerance(one) * float(one.detach().abs().max())
    return int(bad.nonzero()[0]) if bool(bad.any()) else 0


def _tolerance(tensor: Tensor) -> float:
    return _by_type(tensor.dtype)


def _by_type(dtype: torch.dtype) -> float:
    """Return the largest relative difference that rounding explains."""
    known = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
    return known.get(dtype, 0.0 if not dtype.is_floating_point else 2e-1)
