"""The exact data path: bitwise the batches, the order and the random states of the plain DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data._utils import collate as collates
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from kit import hand
from zae import Trainer
from zae.data.gather import batches_of, why_not

LENGTHS = (1, 7, 8)
SIZES = (1, 4, 30)


def tensors(length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(length, 2, 3, generator=generator)
    return inputs, torch.randint(0, 9, (length,), generator=generator), inputs.sum((1, 2)) > 0


class Rows(Dataset[Any]):
    """A dataset that gives several samples at once, each with a number of the global stream."""

    def __init__(self, length: int) -> None:
        self.inputs = torch.arange(float(length))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked for one sample")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"row": index, "x": self.inputs[index] + torch.rand(1), "name": str(index)} for index in indices]


class Named(TensorDataset):
    """A TensorDataset with a name: it gives what a TensorDataset returns."""

    name = "named"


DATASETS: dict[str, Callable[[int], Any]] = {
    "TensorDataset": lambda n: TensorDataset(*tensors(n)),
    "one tensor": lambda n: TensorDataset(tensors(n)[1]),
    "subclass": lambda n: Named(*tensors(n)),
    "Subset of a list": lambda n: Subset(TensorDataset(*tensors(n + 5)), [*range(n - 1, 0, -1), -1]),
    "Subset of a range": lambda n: Subset(TensorDataset(*tensors(2 * n)), range(1, 2 * n, 2)),
    "Subset of a tensor": lambda n: Subset(TensorDataset(*tensors(n + 2)), torch.arange(n) + 1),
    "Subset of a Subset": lambda n: Subset(Subset(TensorDataset(*tensors(n)), list(range(n))[::-1]), range(n)),
    "__getitems__": Rows,
    "Subset of __getitems__": lambda n: Subset(Rows(n + 3), range(3, n + 3)),
    "StackDataset": lambda n: StackDataset(TensorDataset(*tensors(n)), Rows(n)),
    "StackDataset of names": lambda n: StackDataset(a=TensorDataset(*tensors(n)), b=Subset(Rows(n), range(n))),
}


UNUSUAL = ("__getitems__", "Subset of __getitems__", "StackDataset", "StackDataset of names")


class Given(Sampler[Any]):
    """A sampler, or batch sampler, that draws as it begins and gives what it was given."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def __iter__(self) -> Iterator[Any]:
        torch.rand(3)
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared(dataset: Any, **options: Any) -> DataLoader[Any]:
    """One generator for the loader and its sampler, as ``shuffle=True, generator=...`` makes it."""
    return DataLoader(dataset, shuffle=True, generator=seeded(), **options)


# Each makes a loader of a dataset, a batch size and drop_last.
SAMPLERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda data, **o: DataLoader(data, **o),
    "in order, a generator": lambda data, **o: DataLoader(data, generator=seeded(), **o),
    "shuffled": lambda data, **o: DataLoader(data, shuffle=True, **o),
    "shuffled, a generator": shared,
    "two generators": lambda data, **o: DataLoader(
        data, sampler=RandomSampler(data, generator=seeded(1)), generator=seeded(2), **o
    ),
    "replacement": lambda data, **o: DataLoader(data, sampler=RandomSampler(data, True, 40, seeded()), **o),
    "more samples": lambda data, **o: DataLoader(
        data, sampler=RandomSampler(data, num_samples=2 * len(data) + 1, generator=seeded()), **o
    ),
    "fewer samples": lambda data, **o: DataLoader(data, sampler=RandomSampler(data, num_samples=1), **o),
    "of another source": lambda data, **o: DataLoader(data, sampler=SequentialSampler(range(len(data) // 2)), **o),
    "SubsetRandomSampler": lambda data, **o: DataLoader(
        data, sampler=SubsetRandomSampler(range(0, len(data), 2), seeded()), **o
    ),
    "WeightedRandomSampler": lambda data, **o: DataLoader(
        data, sampler=WeightedRandomSampler([1.0] * len(data), 11), **o
    ),
    "weighted, without replacement": lambda data, **o: DataLoader(
        data, sampler=WeightedRandomSampler([0.5] * (len(data) - 1) + [2.0], len(data), False, seeded()), **o
    ),
    "rank 0 of 2": lambda data, **o: DataLoader(data, sampler=DistributedSampler(data, 2, 0), **o),
    "rank 1 of 2": lambda data, **o: DataLoader(data, sampler=DistributedSampler(data, 2, 1, shuffle=False), **o),
    "a sampler of rows": lambda data, **o: DataLoader(data, sampler=Given([0, -1, len(data) - 1, 0]), **o),
    "a BatchSampler": lambda data, batch_size, drop_last: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data, generator=seeded()), batch_size, drop_last)
    ),
    "batches of rows": lambda data, batch_size, drop_last: DataLoader(
        data, batch_sampler=Given([[0], (0, len(data) - 1), [-1, 0], range(1), torch.arange(1)])
    ),
}


def states(loader: DataLoader[Any]) -> tuple[bytes, ...]:
    """The global random state, and those of all generators of a loader."""
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = [g for g in (getattr(owner, "generator", None) for owner in owners) if g is not None]
    return tuple(state.numpy().tobytes() for state in [torch.get_rng_state(), *(g.get_state() for g in generators)])


def described(batch: Any) -> Any:
    """All that can be seen of a batch: the types of its containers, and its tensors' values, types and strides."""
    if isinstance(batch, Tensor):
        flags = (batch.is_contiguous(), batch.requires_grad, batch.storage_offset(), batch.untyped_storage().nbytes())
        return (batch.dtype, tuple(batch.shape), batch.stride(), *flags, batch.tolist())
    if isinstance(batch, dict):
        return type(batch), {key: described(value) for key, value in batch.items()}
    return (type(batch), [described(value) for value in batch]) if isinstance(batch, (list, tuple)) else batch


def walked(loader: DataLoader[Any], fast: bool, epochs: int = 2) -> list[Any]:
    """Everything that two epochs show, to a loop that draws numbers itself, and what is drawn after the last batch."""
    torch.manual_seed(11)
    seen: list[Any] = []
    for _ in range(epochs):
        batches = batches_of(loader, fast)
        seen.append(states(loader))
        for batch in batches:
            seen += [described(batch), states(loader)]
            torch.rand(1)
        seen.append(states(loader))
    return seen


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_every_batch_and_random_state_is_that_of_the_plain_loader(dataset: str, sampler: str) -> None:
    for length, size, drop_last in itertools.product(LENGTHS, SIZES, (False, True)):
        if sampler == "of another source" and length < 2:
            continue  # Torch has no sampler of nothing.

        def make(length: int = length, size: int = size, drop_last: bool = drop_last) -> DataLoader[Any]:
            return SAMPLERS[sampler](DATASETS[dataset](length), batch_size=size, drop_last=drop_last)

        assert (why_not(make()) is None) == (dataset not in UNUSUAL)
        assert walked(make(), True) == walked(make(), False), (length, size, drop_last)


@pytest.mark.parametrize(
    "sampler",
    ["WeightedRandomSampler", "weighted, without replacement", "in order", "shuffled, a generator", "a BatchSampler",
     "replacement", "more samples", "of another source", "rank 0 of 2"],
)  # fmt: skip
@pytest.mark.parametrize("dataset", ["TensorDataset", "Subset of a range", "Subset of a Subset"])
def test_the_dataset_is_not_asked_for_samples(dataset: str, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SAMPLERS[sampler](DATASETS[dataset](9), batch_size=4, drop_last=False)
    batches: Any = batches_of(loader)
    asked: list[Any] = []
    original = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: asked.append(index) or original(self, index))
    assert len(list(batches)) > 0
    assert not asked
    assert len(list(loader)) > 0
    assert asked


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", ["TensorDataset", "Subset of a list", "Subset of a range"])
def test_a_step_that_changes_its_batch_does_not_change_the_dataset(dataset: str, sampler: str) -> None:
    data = DATASETS[dataset](9)
    source = data if isinstance(data, TensorDataset) else data.dataset
    before = [tensor.clone() for tensor in source.tensors]
    for batch in batches_of(SAMPLERS[sampler](data, batch_size=4, drop_last=False)):
        for tensor in batch:
            tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, source.tensors, strict=True))


def test_weights_for_rows_that_are_not_there_are_refused_as_the_plain_loader_refuses_them() -> None:
    loader = DataLoader(TensorDataset(torch.arange(3.0)), sampler=WeightedRandomSampler([0.0, 0, 0, 1.0], 4))
    for fast in (True, False):
        with pytest.raises(IndexError):
            list(batches_of(loader, fast))


def double(loader: Any) -> None:
    loader.dataset.tensors = tuple(tensor * 2 for tensor in loader.dataset.tensors)


def shorten(loader: Any) -> None:
    loader.dataset.tensors = tuple(tensor[:5] for tensor in loader.dataset.tensors)


def lengthen(loader: Any) -> None:
    loader.dataset.tensors = tuple(torch.cat([tensor, tensor]) for tensor in loader.dataset.tensors)


def transpose(loader: Any) -> None:
    inputs, targets = loader.dataset.tensors
    loader.dataset.tensors = (inputs.transpose(1, 2).contiguous().transpose(1, 2), targets)


def turn_round(loader: Any) -> None:
    loader.dataset.indices = loader.dataset.indices[::-1]


def leave_out(loader: Any) -> None:
    loader.dataset.indices = loader.dataset.indices[:-3]


def put_in(loader: Any) -> None:
    loader.dataset.indices = [*loader.dataset.indices, 4, 4]


def take_another(loader: Any) -> None:
    loader.dataset.dataset = TensorDataset(*(tensor * 3 for tensor in loader.dataset.dataset.tensors))


def take_samples(loader: Any) -> None:
    loader.dataset.dataset = [(torch.ones(1), index) for index in range(20)]


def take_more(loader: Any) -> None:
    loader.batch_sampler.batch_size += 1


def drop(loader: Any) -> None:
    loader.batch_sampler.drop_last = True


@pytest.mark.parametrize("sampler", ["in order", "shuffled, a generator", "WeightedRandomSampler", "rank 0 of 2"])
@pytest.mark.parametrize(
    ("change", "subset"),
    [(each, False) for each in (double, shorten, lengthen, transpose, take_more, drop)]
    + [(each, True) for each in (turn_round, leave_out, put_in, take_another, take_samples, take_more)],
)
def test_what_a_step_changes_is_seen_at_the_next_batch(
    change: Callable[[Any], None], subset: bool, sampler: str
) -> None:
    """Other tensors, indices, datasets and batch sizes: batches, random states and errors are the plain loader's."""

    def seen(fast: bool) -> list[Any]:
        data = TensorDataset(*tensors(9)[:2])
        made = SAMPLERS[sampler](
            Subset(data, [8, 1, 5, 0, -2, 3, 3]) if subset else data, batch_size=2, drop_last=False
        )
        torch.manual_seed(3)
        found: list[Any] = []
        try:
            for batch in batches_of(made, fast):
                found += [described(batch), states(made)]
                change(made)
        except Exception as error:
            found.append((type(error), str(error)))
        return [*found, states(made)]

    assert len(seen(True)) > 3
    assert seen(True) == seen(False)


@pytest.mark.parametrize(
    "entry", [[9], [-10], [0, 99], [True, False], [0.5], ["a"], [], [[0, 1], [2, 3]], [slice(2)], 3]
)
@pytest.mark.parametrize("dataset", ["TensorDataset", "Subset of a range"])
def test_what_cannot_index_is_refused_as_the_plain_loader_refuses_it(dataset: str, entry: Any) -> None:
    def outcome(fast: bool) -> Any:
        loader = DataLoader(DATASETS[dataset](9), batch_sampler=Given([entry]))
        try:
            return [described(batch) for batch in batches_of(loader, fast)]
        except Exception as error:
            return type(error), str(error)

    assert outcome(True) == outcome(False)


def test_a_subset_with_rows_that_are_not_there_fails_where_the_plain_loader_does() -> None:
    for fast in (True, False):
        batches = batches_of(DataLoader(Subset(TensorDataset(torch.arange(4.0)), [0, 1, 7]), batch_size=2), fast)
        assert next(batches)[0].tolist() == [0.0, 1.0]
        with pytest.raises(IndexError):
            next(batches)


class Ending(Rows):
    """Has no more rows than three, and says so as an iterator does."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if max(indices) > 2:
            raise StopIteration
        return super().__getitems__(indices)


def test_a_dataset_that_says_that_it_ends_ends_the_epoch() -> None:
    assert [len(list(batches_of(DataLoader(Ending(9)), fast))) for fast in (True, False)] == [3, 3]


class Doubled(TensorDataset):
    """Gives other samples than a TensorDataset."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor * 2 for tensor in super().__getitem__(index))


class Longer(TensorDataset):
    """Says another length."""

    def __len__(self) -> int:
        return 2


class Drawing(TensorDataset):
    """Gives other tensors each time that it is asked for them."""

    tensors = property(lambda self: (torch.rand(4),), lambda self, tensors: None)  # type: ignore[assignment]


class Stream(IterableDataset[Any]):
    """A stream with a method that its loader never calls."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(5))

    def __getitems__(self, indices: Any) -> Any:
        raise AssertionError("asked for rows")


class Loader(DataLoader[Any]):
    """A loader of another kind."""


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def of(*parts: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*parts), batch_size=2, **options)


X = torch.arange(12.0).view(4, 3)
PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1, 2], "it is a list"),
    "subclass": (lambda: Loader(TensorDataset(X)), "it is a Loader"),
    "workers": (lambda: of(X, num_workers=1), "num_workers=1"),
    "pinned": (lambda: of(X, pin_memory=True), "pin_memory=True"),
    "worker_init_fn": (lambda: of(X, worker_init_fn=print), "worker_init_fn"),
    "collate_fn": (lambda: of(X, collate_fn=collate), "custom collate_fn"),
    "no batches": (lambda: DataLoader(TensorDataset(X), batch_size=None), "batch_size=None"),
    "samples": (lambda: DataLoader([1, 2, 3]), "a list, is not a TensorDataset"),
    "__getitem__": (lambda: DataLoader(Doubled(X)), "a Doubled, is not a TensorDataset"),
    "__len__": (lambda: DataLoader(Longer(X)), "a Longer, is not a TensorDataset"),
    "property": (lambda: DataLoader(Drawing(X)), "a Drawing, is not a TensorDataset"),
    "stream": (lambda: DataLoader(Stream(), batch_size=2), "is an IterableDataset"),
    "transposed": (lambda: of(torch.ones(3, 4).t()), "tensor 0 of its dataset is empty or not contiguous"),
    "memory format": (
        lambda: of(X, torch.ones(4, 2, 3, 3).to(memory_format=torch.channels_last)),
        "tensor 1 of its dataset is empty or not contiguous",
    ),
    # This one is_contiguous(), but a slice of it has other strides than stacked samples.
    "one channel": (lambda: of(torch.ones(4, 3, 3, 1).permute(0, 3, 1, 2)), "not contiguous"),
    "expanded": (lambda: of(torch.ones(1, 3).expand(4, 3)), "not contiguous"),
    "empty": (lambda: of(torch.ones(4, 0)), "empty"),
    "gradient": (lambda: of(torch.ones(4, 2, requires_grad=True)), "requires a gradient"),
    "parameter": (lambda: of(torch.nn.Parameter(torch.ones(4), requires_grad=False)), "is a Parameter"),
    "sparse": (lambda: of(torch.eye(4).to_sparse()), "sparse"),
    "device": (lambda: of(torch.ones(4, 2, device="meta")), "is on meta"),
    "type": (lambda: of(torch.ones(4, 2).to(torch.float8_e4m3fn)), "float8"),
    "lazy": (lambda: of(torch.ones(4, 2, dtype=torch.complex64).conj()), "lazy"),
    "of a subset": (lambda: DataLoader(Subset(TensorDataset(X.t().contiguous().t()), [0, 1])), "not contiguous"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_is_not_recognised_takes_the_plain_loader_and_says_why(case: str) -> None:
    make, reason = PLAIN[case]
    loader = make()
    assert reason in str(why_not(loader))
    assert type(batches_of(loader)) is type(iter(loader))


def test_a_changed_collate_or_default_device_takes_the_plain_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = of(X)
    with torch.device("meta"):
        assert "default device is meta" in str(why_not(loader))
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: "mine")
    assert "default collate" in str(why_not(loader))
    assert list(batches_of(loader)) == ["mine", "mine"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__"), (TensorDataset, "__getitem__"), (Subset, "__len__")],
)
def test_what_somebody_has_put_in_place_of_a_method_of_torch_is_called(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(kind, name), []
    monkeypatch.setattr(kind, name, lambda *args: calls.append(name) or original(*args))
    loader = DataLoader(Subset(TensorDataset(X), range(4)), batch_size=2)
    assert why_not(loader) == f"{kind.__name__}.{name} was replaced"
    assert len([*batches_of(loader)]) == 2
    assert calls


@pytest.mark.parametrize("sampler", [BatchSampler, SequentialSampler, RandomSampler, WeightedRandomSampler])
def test_what_somebody_has_put_in_place_of_a_sampler_is_called(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = sampler.__iter__, []
    monkeypatch.setattr(sampler, "__iter__", lambda self: calls.append(sampler) or original(self))
    names: dict[Any, str] = {WeightedRandomSampler: "WeightedRandomSampler", RandomSampler: "shuffled"}
    loader = SAMPLERS[names.get(sampler, "in order")](TensorDataset(X), batch_size=2)
    assert why_not(loader) is None
    assert len([*batches_of(loader)]) in (2, 6)
    assert calls


@pytest.mark.parametrize("name", ["default_collate", "collate_tensor_fn"])
def test_a_collate_function_of_torch_that_was_replaced_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(batch: Any, **options: Any) -> Any:
        return "mine"

    monkeypatch.setattr(collates, name, mine)
    monkeypatch.setitem(default_collate_fn_map, Tensor, mine)
    loader = of(X)
    assert "collate" in str(why_not(loader))
    assert "mine" in next(iter(batches_of(loader)))


def test_strides_of_one_channel_are_why_contiguous_is_not_enough() -> None:
    images = torch.ones(4, 3, 3, 1).permute(0, 3, 1, 2)
    assert images.is_contiguous()
    (batch,) = next(iter(of(images)))
    assert batch.stride() != images[:2].clone().stride()


# ------------------------------------------------------------------------------------------------- in the trainer


class Task(Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


def trainer(fast: bool) -> Task:
    model = hand.network()
    return Task(model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), fast_data=fast)


def trained(fast: bool, make: Callable[[], Any], stop_at: int | None = None, resume_fast: bool = True) -> Any:
    """Weights, history and random state of two epochs, stopped and resumed in a fresh trainer where asked for."""
    torch.manual_seed(3)
    task, loader, valid = trainer(fast), make(), hand.loader(10, seed=9, shuffle=False)
    metrics = task.run(2, loader, valid, max_steps=stop_at)
    if stop_at is not None:
        state = task.state_dict()
        torch.manual_seed(99)
        task, loader = trainer(resume_fast), make()
        task.load_state_dict(state)
        metrics = task.run(2 - task.progress_checker.epoch, loader, valid)
    history = (metrics["train_metrics_history"], metrics["valid_metrics_history"])
    return hand.digest(task.unwrap()), history, states(loader)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": hand.loader,
    "in order": lambda: hand.loader(shuffle=False),
    "a generator": lambda: hand.loader(generator=seeded()),
    "drop_last": lambda: hand.loader(drop_last=True, generator=seeded()),
    "weights": lambda: hand.loader(sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22)),
    "rank 1": lambda: hand.loader(sampler=DistributedSampler(hand.data(), 2, 1, seed=4)),
    "subset": lambda: DataLoader(Subset(hand.data(), range(3, 22)), batch_size=4, shuffle=True),
}


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("name", LOADERS)
def test_training_and_resuming_are_bitwise_those_of_the_plain_loader(name: str) -> None:
    expected = trained(False, LOADERS[name])
    assert trained(True, LOADERS[name]) == expected
    for stop_at, resume_fast in itertools.product((1, 3, 5), (True, False)):
        assert trained(True, LOADERS[name], stop_at, resume_fast) == expected, (stop_at, resume_fast)
        assert trained(False, LOADERS[name], stop_at, resume_fast) == expected, (stop_at, resume_fast)


def test_the_weights_are_those_of_the_loop_by_hand() -> None:
    torch.manual_seed(3)
    model = hand.network()
    hand.train(model, torch.optim.AdamW(model.parameters(), lr=0.05), hand.loader(), 2)
    torch.manual_seed(3)
    task = trainer(True)
    task.run(2, hand.loader())
    assert hand.digest(task.unwrap()) == hand.digest(model)


@pytest.mark.parametrize("fast", [True, False])
def test_evaluation_and_inference_take_the_path_that_was_asked_for(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    original = _MapDatasetFetcher.fetch
    loader = hand.loader(shuffle=False)

    def note(self: Any, entry: Any) -> Any:
        asked.append(entry)
        return original(self, entry)

    task = trainer(fast)
    expected = task.evaluate(list(loader))
    monkeypatch.setattr(_MapDatasetFetcher, "fetch", note)
    assert task.evaluate(loader) == expected
    assert len(task.inference(loader)) == len(loader)
    assert len(asked) == (0 if fast else 2 * len(loader))
