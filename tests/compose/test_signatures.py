"""An override takes every argument of each method that it may stand before, in every pair of add-ons."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import zae.addons
from zae import AddOnBase, Trainer
from zae.compose.introspect import is_marked
from zae.errors import AddOnConflict

PUBLIC = [getattr(zae.addons, name) for name in zae.addons.__all__]
ADD_ONS = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, AddOnBase)]
Parameter = inspect.Parameter


def compositions() -> Iterator[Any]:
    """Each class of two add-ons that go together."""
    for pair in itertools.combinations(ADD_ONS, 2):
        try:
            yield Trainer.add_on(*pair)
        except AddOnConflict:
            continue


def parameters(method: Any) -> list[Parameter]:
    return list(inspect.signature(method).parameters.values())[1:]


def refused_arguments(outer: Any, inner: Any) -> list[str]:
    """The arguments of the inner method that a call of the outer one refuses, or understands as something else."""
    taken, wanted = parameters(outer), parameters(inner)
    names = {each.name: each for each in taken}
    kinds = {each.kind for each in taken}
    by_position = [each for each in taken if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    refused = []
    for index, each in enumerate(wanted):
        if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            is_taken = each.kind in kinds
        elif each.kind is Parameter.KEYWORD_ONLY:
            is_taken = each.name in names or Parameter.VAR_KEYWORD in kinds
        else:
            passes_all = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds
            is_taken = passes_all or (index < len(by_position) and each.name in names)
        is_forced = each.name in names and names[each.name].default is Parameter.empty
        if not is_taken or (is_forced and each.default is not Parameter.empty):
            refused.append(str(each))
    known = {each.name for each in wanted}
    forced = [each for each in by_position[len(wanted) :] if each.default is Parameter.empty]
    return [*refused, *(f"{each} is new" for each in forced if each.name not in known)]


def test_an_override_takes_every_argument_of_what_it_overrides() -> None:
    """``save_model()`` and ``save_model(folder, metadata=...)`` failed beside any engine: its override had no such."""
    found, compared = {}, set()
    for cls in compositions():
        for name in dir(cls):
            if name.startswith("_"):
                continue
            owners = [each for each in cls.__mro__ if inspect.isfunction(each.__dict__.get(name))]
            methods = [(each, each.__dict__[name]) for each in owners]
            for (outer, override), (inner, overridden) in itertools.combinations(methods, 2):
                pair = (override, overridden)
                if pair in compared or is_marked(overridden, "__by_name__"):
                    continue
                compared.add(pair)
                if refused := refused_arguments(override, overridden):
                    found[f"{outer.__name__}.{name} before {inner.__name__}.{name}"] = refused
    assert found == {}
    assert len(compared) > 300


class Inner:
    def save(self, path: Any = None, *, metadata: Any = None) -> None: ...

    def run(self, loader: Any, steps: int = 1) -> None: ...


class Outer:
    def save(self, path: Any) -> None: ...

    def run(self, data: Any, steps: int = 1, more: int = 2) -> None: ...


class Whole:
    def save(self, path: Any = None, **options: Any) -> None: ...

    def run(self, *args: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("outer", "inner", "refused"),
    [
        (Outer.save, Inner.save, ["path: 'Any' = None", "metadata: 'Any' = None"]),
        (Whole.save, Inner.save, []),
        (Inner.save, Whole.save, ["**options: 'Any'"]),
        (Outer.run, Inner.run, ["loader: 'Any'"]),
        (Whole.run, Inner.run, []),
    ],
)
def test_the_comparison_finds_what_a_call_would_refuse(outer: Any, inner: Any, refused: list[str]) -> None:
    assert refused_arguments(outer, inner) == refused
