"""Types with limits: each refuses what is outside in words, and those of all add-ons do so in a trainer."""

from __future__ import annotations

import enum
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch

from kit import hand
from kit.table import TABLE, Task
from zae import AddOnBase, ConfigError
from zae.arguments import Count, CountOrZero, Interval, NonNegative, Seed, check_argument, checked, declared_arguments
from zae.errors import ZaeError

if TYPE_CHECKING:
    from zae.loop.cadence import Every


class Side(enum.StrEnum):
    """As libraries declare their choices."""

    LEFT = "left"


OPTIONAL_COUNT: Any = Count | None
SIDE: Any = Literal["left", "right"]
SHARE: Any = Annotated[float, Interval("(0, 1]")]
SIZES: Any = Annotated[Mapping[str, int], "a dict of sizes"]
FUNCTION: Any = Annotated[Callable[[int], bool], "a function of a step"] | None


@pytest.mark.parametrize(
    ("kind", "value", "got"),
    [
        (Count, np.int64(1), 1),
        (OPTIONAL_COUNT, None, None),
        (CountOrZero, 0, 0),
        (Seed, 2**64 - 1, 2**64 - 1),
        (NonNegative, np.float32(0.5), 0.5),
        (NonNegative, 2, 2.0),
        (SHARE, 1, 1.0),
        (bool, np.bool_(False), False),
        (SIDE, Side.LEFT, "left"),
        (SIZES, {"a": 1}, {"a": 1}),
        (FUNCTION, math.isnan, math.isnan),
    ],
    ids=str,
)
def test_what_is_taken(kind, value, got):
    """A number of NumPy, a bool of it, and an enum of text come as plain values."""
    found = check_argument("it", value, kind)
    assert (found, type(found)) == (got, type(got))


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (Count, [0, 1.0, "1", True, None, math.nan], "a whole number of at least 1"),
        (OPTIONAL_COUNT, [0, False], "a whole number of at least 1, or None"),
        (Seed, [-1, 2**64], "a whole number of at least 0 and below 2**64"),
        (NonNegative, [-1e-9, math.inf, math.nan, "0", True, 1j, torch.ones(2)], "a number of at least 0"),
        (SHARE, [0, 1.01, -math.inf], "a number in (0, 1]"),
        (bool, [0, 1, "False", None, []], "True or False"),
        (Literal[False, "auto"], [0, np.ones(2)], "False or 'auto'"),
        (SIDE, ["lift"], "'left' or 'right'; did you mean 'left'?"),
        (SIZES, [[1], None], "a dict of sizes"),
        (FUNCTION, [3], "a function of a step, or None"),
    ],
    ids=str,
)
def test_what_is_refused(kind, values, words):
    """With the value that was found, and what to write."""
    for value in values:
        with pytest.raises(ConfigError) as caught:
            check_argument("it", value, kind)
        assert str(caught.value) == f"it={value!r:.80}; it must be {words}"


@checked
def repeat(text: str, times: Count = 1, *, every: Every | None = None, side: Literal["left", "right"] = "left") -> str:
    return side + text * times


def test_a_checked_function():
    """By position and by name; a type that cannot be checked, or is for type checkers only, takes anything."""
    assert repeat("a", np.int32(2), every=3) == "leftaa"
    assert repeat("b", side="right") == "rightb"
    for args, options in ((("a", 0), {}), (("a",), {"times": 0})):
        with pytest.raises(ConfigError, match="times=0; it must be a whole number of at least 1"):
            repeat(*args, **options)
    with pytest.raises(TypeError, match="text"):
        repeat()
    assert set(declared_arguments(repeat)) == {"times", "side"}


class CropAddon(AddOnBase):
    """Stand for an add-on of another package."""

    layer = "loop"

    def __init__(self, *args: Any, crop_size: Count = 4, crop_twice: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.crop_size = crop_size


class SmallCropAddon(CropAddon):
    """Take fewer values than its base."""

    def __init__(self, *args: Any, crop_size: Annotated[int, Interval("[1, 8]")] = 4, **kwargs: Any) -> None:
        super().__init__(*args, crop_size=crop_size, **kwargs)


def make(cls: Any, **options: Any) -> Any:
    return cls(hand.network(0), "cpu", optimizer=torch.optim.SGD, **options)


def test_an_add_on_of_another_package():
    assert type(make(Task.add_on(CropAddon), crop_size=np.int64(2)).crop_size) is int
    with pytest.raises(ConfigError, match="crop_twice='no'; it must be True or False"):
        make(Task.add_on(CropAddon), crop_twice="no")


def test_a_derived_add_on_has_its_own_limits_and_those_of_its_base():
    assert make(Task.add_on(SmallCropAddon), crop_size=8).crop_size == 8
    for size in (0, 9):
        with pytest.raises(ConfigError, match=rf"crop_size={size}; it must be a whole number in \[1, 8\]"):
            make(Task.add_on(SmallCropAddon), crop_size=size)


def test_an_option_that_a_task_gives_is_checked():
    """Also where it is not an argument of the class; the task's own arguments are not."""

    class Cropped(CropAddon, Task):
        def __init__(self, *args: Any, size: Any = 3, fast: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, crop_size=size, **kwargs)
            self.fast = fast

    assert make(Cropped, fast="very").fast == "very"
    with pytest.raises(ConfigError, match="crop_size=0; it must be a whole number of at least 1"):
        make(Cropped, size=0)


# ---------------------------------------------------------------------------------------- the options of all add-ons


def single_types(kind: Any) -> Iterator[Any]:
    """The types of a union, each alone."""
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for part in get_args(kind):
            yield from single_types(part)
    else:
        yield kind


def edges(kind: Any) -> tuple[list[Any], list[Any]]:
    """Values at the limits of a type, and values just outside."""
    within, outside = [], [object()]
    for single in single_types(kind):
        if single is bool:
            within += [True, False]
            outside += [1, []]
        elif get_origin(single) is Literal:
            within += get_args(single)
            outside += [f"{each}s" for each in get_args(single)]
        for interval in (note for note in get_args(single) if isinstance(note, Interval)):
            is_int = get_args(single)[0] is int
            for end, bracket, away in zip(interval.ends, (interval.text[0], interval.text[-1]), (-math.inf, math.inf)):
                if bracket in "[]":
                    step = 1 if away > 0 else -1
                    within.append(int(end) if is_int else end)
                    outside.append(int(end) + step if is_int else math.nextafter(end, away))
                elif math.isfinite(end):
                    outside.append(int(end) if is_int else end)
    return within, outside


def options_with_limits() -> Iterator[Any]:
    """Each option of each add-on that has declared limits, with the entry of an add-on that takes it."""
    seen = set()
    for entry in TABLE:
        for owner in Task.add_on(entry.add_on).__mro__:
            init = owner.__dict__.get("__init__")
            if owner in seen or not isinstance(init, FunctionType) or not owner.__module__.startswith("zae."):
                continue
            seen.add(owner)
            # model_init becomes the model before any __init__.
            for name in (name for name in declared_arguments(init) if name != "model_init"):
                kind = eval(init.__annotations__[name], inspect.unwrap(init).__globals__)
                yield pytest.param(entry, name, kind, id=f"{owner.__name__}-{name}")


@pytest.mark.parametrize(("entry", "name", "kind"), [*options_with_limits()])
def test_each_declared_limit(entry, name, kind, tmp_path):
    """What is outside is refused by name, and nothing is written; the limit itself is not refused by it."""
    within, outside = edges(kind)
    for value in outside:
        with pytest.raises(ConfigError, match=rf"^{name}={re.escape(repr(value)[:80])}; it must be "):
            make(Task.add_on(entry.add_on), **{**entry.neutral(tmp_path), name: value})
    assert list(tmp_path.iterdir()) == []
    for value in within:
        message = ""
        try:
            make(Task.add_on(entry.add_on), **{**entry.neutral(tmp_path), name: value})
        except ZaeError as error:
            message = str(error)
        assert f"{name}={value!r}; it must be" not in message


def test_no_limit_is_overlooked():
    """A type that names a limit can be evaluated, and is checked."""
    names = r"\b(Count|CountOrZero|Seed|NonNegative|Interval|Literal|Annotated)\b|^bool$|^bool \| None$"
    owners = {owner for entry in TABLE for owner in Task.add_on(entry.add_on).__mro__ if "__init__" in owner.__dict__}
    inits = [owner.__init__ for owner in owners if owner.__module__.startswith("zae.")]
    for init in inits:
        stated = {name for name, text in init.__annotations__.items() if re.search(names, str(text))}
        assert stated <= set(declared_arguments(init)), init.__qualname__
    assert len(inits) > len(TABLE) / 2
