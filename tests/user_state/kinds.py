"""Values that training changes, and the objects of a user that keep them, for the tests of this folder."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler

from zae import Trainer

ROWS = 24
BATCH = 4
PER_EPOCH = ROWS // BATCH
INPUTS = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
TARGETS = (INPUTS.sum(1) > 0).long()


class Kind(NamedTuple):
    """A kind of value: as it begins, as a number, and changed with the mean of what is seen."""

    begin: Callable[[], Any]
    number: Callable[[Any], float]
    change: Callable[[Any, float], Any]


def _in_place(function: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
    def change(value: Any, seen: float) -> Any:
        function(value, seen)
        return value

    return change


def _nested(value: Any, seen: float) -> None:
    value["level"] += 1
    value["rows"].append((seen, [value["level"]]))
    value["inner"]["mean"] *= 0.5
    value["inner"]["mean"] += seen


VALUES: dict[str, Kind] = {
    "number": Kind(lambda: 0, float, lambda value, seen: value + 1),
    "text": Kind(str, len, lambda value, seen: value + "a"),
    "tensor": Kind(lambda: torch.zeros(2), lambda value: float(value.sum()), lambda value, seen: value * 0.5 + seen),
    "tensor in place": Kind(
        lambda: torch.zeros(2), lambda value: float(value.sum()), _in_place(lambda value, seen: value.add_(seen))
    ),
    "tensor through data": Kind(
        lambda: torch.zeros(2), lambda value: float(value.sum()), _in_place(lambda value, seen: value.data.add_(seen))
    ),
    "tensor with a graph": Kind(
        lambda: torch.zeros(2),
        lambda value: float(value.detach().sum()),
        lambda value, seen: value.detach() * 0.5 + torch.ones(2, requires_grad=True) * seen,
    ),
    "array": Kind(
        lambda: np.zeros(2), lambda value: float(value.sum()), _in_place(lambda value, seen: np.add(value, seen, value))
    ),
    "stream of torch": Kind(
        lambda: torch.Generator().manual_seed(3),
        lambda value: float(torch.rand((), generator=value)),
        lambda value, seen: value,
    ),
    "stream of NumPy": Kind(
        lambda: np.random.default_rng(3), lambda value: float(value.random()), lambda value, seen: value
    ),
    "stream of Python": Kind(lambda: random.Random(3), lambda value: value.random(), lambda value, seen: value),
    "list": Kind(list, lambda value: len(value) + sum(value), _in_place(lambda value, seen: value.append(seen))),
    "queue": Kind(
        lambda: deque(maxlen=3),
        lambda value: sum(value) + len(value),
        _in_place(lambda value, seen: value.append(seen)),
    ),
    "dict": Kind(
        lambda: {"seen": 0, "limit": 7},
        lambda value: value["seen"] / value["limit"],
        _in_place(lambda value, seen: value.update(seen=value["seen"] + 1)),
    ),
    "counter": Kind(
        Counter, lambda value: sum(value.values()), _in_place(lambda value, seen: value.update([round(seen, 3)]))
    ),
    "nested": Kind(
        lambda: {"level": 0, "rows": [], "inner": {"mean": torch.zeros(1)}},
        lambda value: value["level"] + len(value["rows"]) + float(value["inner"]["mean"]),
        _in_place(_nested),
    ),
}


class Keeps:
    """An object that keeps a value."""

    kind = "number"
    value: Any

    def begin(self, kind: str) -> Any:
        self.kind = kind
        self.value = VALUES[kind].begin()
        return self

    def use(self, seen: float = 1.0) -> float:
        """Return a number of the value, and change it."""
        kind = VALUES[self.kind]
        number = kind.number(self.value)
        self.value = kind.change(self.value, seen)
        return math.tanh(0.1 * number)


class InSlots:
    __slots__ = ("kind", "value")
    begin, use = Keeps.begin, Keeps.use


@dataclass
class InDataclass(Keeps):
    kind: str = "number"
    value: Any = field(default=None)


class Net(Keeps, nn.Module):
    def __init__(self, kind: str) -> None:
        nn.Module.__init__(self)
        self.linear, self.inner = nn.Linear(4, 2), None
        self.kind, self.value = kind, None

    def forward(self, inputs: Tensor) -> Any:
        factor = 1.0
        if self.value is not None:
            factor += self.use(float(inputs.mean()))
        if self.inner is not None:
            factor += self.inner.use(float(inputs.mean()))
        return self.linear(inputs * factor)


class Data(Keeps, Dataset[Any]):
    inner: Any = None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        row = INPUTS[index]
        factor = 1.0
        if hasattr(self, "value"):
            factor += self.use(float(row.mean()))
        if self.inner is not None:
            factor += self.inner.use(float(row.mean()))
        return row * factor, TARGETS[index]


class Order(Keeps, Sampler[int]):
    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        for index in range(ROWS):
            yield (index * 5 + int(1000 * self.use(index / ROWS))) % ROWS


class Batches(Keeps, BatchSampler):
    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(ROWS)), BATCH, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            shift = int(1000 * self.use(float(batch[0])))
            yield [(index + shift) % ROWS for index in batch]


class Collate(Keeps):
    def __call__(self, rows: list[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(rows)
        return inputs * (1 + self.use(float(inputs.mean()))), targets


class Loader(Keeps):
    """A loader of one's own."""

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, ROWS, BATCH):
            inputs = INPUTS[start : start + BATCH]
            yield inputs * (1 + self.use(float(inputs.mean()))), TARGETS[start : start + BATCH]


OWNERS = (
    *("task", "class of the task", "module", "object of the task", "object in a list", "object in slots"),
    *("dataclass", "object of a module", "dataset", "object of a dataset", "sampler", "batch sampler", "collate"),
    *("loader", "two attributes"),
)


def make(owner: str, kind: str) -> tuple[Any, Any, Any]:
    """Return a class of tasks, a function that makes the model, and a loader, of which one owner keeps the value."""

    class Task(Keeps, Trainer):
        inner: Any = None
        others: Any = ()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if owner in ("task", "two attributes"):
                self.begin(kind)
            if owner == "two attributes":
                self.again = [self.value, 0]
            makers = {"object of the task": Keeps, "object in slots": InSlots, "dataclass": InDataclass}
            if owner in makers:
                self.inner = makers[owner]().begin(kind)
            if owner == "object in a list":
                self.others = [Keeps().begin(kind), Keeps().begin("number")]

        def train_step(self, batch: Any) -> Any:
            inputs, targets = batch
            factor = 1.0
            if hasattr(self, "value"):
                factor += self.use(float(inputs.mean()))
            if owner == "two attributes":  # What is one object stays one.
                same = self.again[0] is self.value
                factor += 0.1 * same
                self.again = [self.value, self.again[1] + 1]
            if self.inner is not None:
                factor += self.inner.use(float(inputs.mean()))
            factor += sum(each.use(float(inputs.mean())) for each in self.others)
            return {"loss": nn.functional.cross_entropy(self.model(inputs * factor), targets)}

        def test_step(self, batch: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

    if owner == "class of the task":
        Task.kind, Task.value = kind, VALUES[kind].begin()

    def model() -> nn.Module:
        net = Net(kind)
        if owner == "module":
            net.begin(kind)
        if owner == "object of a module":
            net.inner = Keeps().begin(kind)
        return net

    data = Data().begin(kind) if owner == "dataset" else Data()
    if owner == "object of a dataset":
        data.inner = Keeps().begin(kind)
    if owner == "loader":
        return Task, model, Loader().begin(kind)
    if owner == "batch sampler":
        return Task, model, DataLoader(data, batch_sampler=Batches().begin(kind))
    options: dict[str, Any] = {"sampler": Order().begin(kind)} if owner == "sampler" else {"shuffle": True}
    if owner == "collate":
        options["collate_fn"] = Collate().begin(kind)
    return Task, model, DataLoader(data, BATCH, **options)
