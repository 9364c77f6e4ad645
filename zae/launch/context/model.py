"""The call of a model whose inputs are divided along the sequence, and whose outputs are gathered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from zae.common.torch_private import call_of, flatten_tree, unflatten_tree
from zae.common.walk import map_tensors, tensors_in
from zae.errors import ConfigError
from zae.launch.context.arguments import check_leaves, get, put
from zae.launch.context.attention import Attention
from zae.launch.context.check import Check, Layout
from zae.launch.context.division import Division, Ranks

__all__ = ["DividedModel"]


class DividedModel:
    """Calls a model with this rank's part of its inputs, and returns what it returns for all of the sequence.

    Parameters
    ----------
    model : Module
        The model itself.
    inputs : dict of str to tuple of int
        The dimensions of the sequence by the name of the parameter, of which the first is divided.
    positions : str, optional
        The parameter that gets the positions where the call gives none.
    ranks : Ranks
        The ranks that divide the sequence.
    ring : callable, optional
        Returns what encloses forwards and backwards instead of the attention that gathers keys and values.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, tuple[int, ...]],
        positions: str | None,
        ranks: Ranks,
        ring: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model, self.inputs, self.ranks = model, inputs, ranks
        self.check = Check(self)
        self._positions, self._ring = positions, ring
        self._signature = inspect.signature(model.forward)
        self._attention = Attention(next(iter(inputs.values()))[0])
        self._divisions: dict[int, Division] = {}
        self._in_step: dict[int, Division] = {}  # Those of this step by the length of a part.
        self._is_inside = False

    # ------------------------------------------------------------------------------------------------- the call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:  # The model calls itself.
            return call_of(self.model)(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        arguments = self._arguments(bound)
        self._is_inside = True
        try:
            layout = self.check.layout_of(bound, arguments)
            return self.gather(self.call_divided(bound, arguments, self._in_step), layout)
        finally:
            self._is_inside = False

    def plain(self, bound: inspect.BoundArguments) -> Any:
        """Call the model without a division."""
        return call_of(self.model)(*bound.args, **bound.kwargs)

    def call_divided(
        self, bound: inspect.BoundArguments, arguments: Mapping[str, Any], step: dict[int, Division]
    ) -> tuple[Any, Division]:
        """Call the model with this rank's part; return what it returns, and the division of the first input."""
        divisions = {name: self._division(self.length_of(name, value)) for name, value in arguments.items()}
        first = next(iter(divisions.values()))
        self._check_lengths(divisions.values(), step)
        own = inspect.BoundArguments(bound.signature, dict(bound.arguments))
        for name, value in arguments.items():
            dim, division = self.inputs[name][0], divisions[name]
            put(own, name, map_tensors(lambda each, dim=dim, by=division: by.take(each, dim), value))  # type: ignore[misc]
        if self._positions is not None and get(own, self._positions) is None:
            device = next(tensors_in(arguments)).device
            put(own, self._positions, first.positions(device)[None])
        with self._over(step):
            made = self.plain(own)
        return made, first

    def gather(self, made: tuple[Any, Division], layout: Layout) -> Any:
        """Return what the model returned, with the parts of all ranks."""
        output, first = made
        leaves, spec = flatten_tree(output)
        if spec != layout.spec:
            raise ConfigError(
                f"{type(self.model).__name__} returned {spec}, and {layout.spec} for a short sequence: what it returns "
                "must not depend on the length"
            )
        whole = [each if dim is None else self._gather_leaf(each, dim, first) for each, dim in zip(leaves, layout.dims)]
        return unflatten_tree(whole, spec)

    def _gather_leaf(self, leaf: Tensor, dim: int, first: Division) -> Tensor:
        division = self._in_step.get(leaf.shape[dim], first)
        if leaf.shape[dim] != division.local:
            raise ConfigError(
                f"{type(self.model).__name__} returned a tensor of {tuple(leaf.shape)} for a part of {first.local} "
                f"positions; dimension {dim} must have one entry for each position"
            )
        return division.gather(leaf, dim, is_output=True)

    # ------------------------------------------------------------------------------------------ what is divided

    def _arguments(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Return the arguments that have a sequence, and refuse those that may hide one."""
        kind = type(self.model).__name__
        for name, value in bound.arguments.items():
            check_leaves(value, f"the argument {name} of {kind}")
        found = {name: get(bound, name) for name in self.inputs}
        found = {name: value for name, value in found.items() if any(True for _ in tensors_in(value))}
        if not found:
            raise ConfigError(
                f"{kind} was called without {' or '.join(self.inputs)}; name in context_inputs what has the sequence, "
                f"with its dimension: context_inputs={{{next(iter(bound.arguments), 'tokens')!r}: 1}}"
            )
        return found

    def length_of(self, name: str, value: Any) -> int:
        """Return the length of the sequence in an argument."""
        dim = self.inputs[name][0]
        shapes = [tuple(each.shape) for each in tensors_in(value)]
        lengths = {shape[dim] for shape in shapes if -len(shape) <= dim < len(shape)}
        if len(lengths) != 1 or any(not -len(shape) <= dim < len(shape) for shape in shapes):
            raise ConfigError(
                f"the argument {name} of {type(self.model).__name__} has the shapes {shapes}, of which dimension {dim} "
                f"is not one sequence; give its dimension, context_inputs={{{name!r}: 1}}"
            )
        return lengths.pop()

    def _division(self, length: int) -> Division:
        if length not in self._divisions:
            if len(self._divisions) > 64:  # Sequences of many lengths.
                self._divisions.clear()
            self._divisions[length] = Division(length, self.ranks)
            if self._ring is not None and self._divisions[length].is_padded:
                raise ConfigError(
                    f"a sequence of {length} positions is not a multiple of {2 * self.ranks.size}, which "
                    "context_attention='ring' needs; pad it, or write context_attention='gather'"
                )
        return self._divisions[length]

    def _check_lengths(self, divisions: Any, step: dict[int, Division]) -> None:
        """Refuse lengths of which a part cannot be told from another sequence."""
        for each in divisions:
            other = step.setdefault(each.local, each)
            if other is not each:
                raise ConfigError(
                    f"a step calls the model with sequences of {other.length} and {each.length} positions, whose parts "
                    f"are both of {each.local}; pad them to one length"
                )
            if each.local in self._attention.others:
                raise ConfigError(
                    f"a part of {each.length} positions is as long as what the model attends to beside the sequence "
                    f"({each.local} keys), so that they cannot be told apart; pad the sequence to another length"
                )

    # -------------------------------------------------------------------------------------- forward and backward

    def _over(self, step: Mapping[int, Division]) -> AbstractContextManager[Any]:
        return self._attention.over(step) if self._ring is None else self._ring()

    def begin_step(self) -> None:
        """Forget the sequences of the step before."""
        self._in_step.clear()

    @contextmanager
    def differentiating(self, step: Mapping[int, Division] | None = None) -> Iterator[None]:
        """Enclose a backward, in which activations may be computed again."""
        before, self.ranks.is_differentiating = self.ranks.is_differentiating, True
        try:
            with self._over(self._in_step if step is None else step):
                yield
        finally:
            self.ranks.is_differentiating = before
