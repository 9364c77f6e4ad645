"""Data that the script has divided by rank, a stream that ends first on a rank, and a loader that ends early."""

from __future__ import annotations

import logging
import re

import datasets
import numpy as np
import pandas
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from kit.rank_tasks import forks
from kit.ranks import each_rank
from zae import LoaderError, Trainer
from zae.addons import MultiGPUAddon
from zae.data.sharding import shard
from zae.data.shards import Ranks
from zae.record.between_ranks import check_loader

SIZE, WORLD = 16, 2


class Task(Trainer):
    """Notes the samples that it has seen."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def train_step(self, batch):
        batch = batch[0] if isinstance(batch, (list, tuple)) else batch
        batch = batch["x"] if isinstance(batch, dict) else batch
        self.seen += batch.reshape(-1).tolist()
        return {"loss": self.model(batch.reshape(-1, 1).float()).square().mean()}

    test_step = train_step


class Files(Dataset):
    """Reads what a list names."""

    def __init__(self, files):
        self._files = files

    def __len__(self):
        return len(self._files)

    def __getitem__(self, index):
        raise AssertionError("no sample is to be read")


class Frame(Files):
    """Has a table."""

    def __init__(self, frame):
        self.frame = frame

    def __len__(self):
        return len(self.frame)


def table():
    return datasets.Dataset.from_dict({"x": list(range(SIZE))}).with_format("torch")


def over(sampler):
    return DataLoader(range(SIZE), batch_size=2, sampler=sampler)


X = torch.arange(SIZE).float().reshape(-1, 1)
PATHS = [f"{index}.png" for index in range(SIZE)]
DIVIDED = {
    "split_dataset_by_node": lambda rank, world: split_dataset_by_node(table(), rank, world),
    "shard": lambda rank, world: table().shard(world, rank),
    "shard in turn": lambda rank, world: table().shard(world, rank, contiguous=False),
    "select": lambda rank, world: table().select(range(rank, SIZE, world)),
    "Subset": lambda rank, world: Subset(X, range(rank, SIZE, world)),
    "Subset of indices": lambda rank, world: Subset(X, torch.arange(SIZE)[rank::world]),
    "Subset of Subset": lambda rank, world: Subset(Subset(X, list(range(rank, SIZE, world))), range(8)),
    "tensors": lambda rank, world: TensorDataset(X[rank::world]),
    "a list": lambda rank, world: list(X)[rank::world],
    "an array": lambda rank, world: np.arange(SIZE)[rank::world],
    "ConcatDataset": lambda rank, world: ConcatDataset([TensorDataset(X[rank::world]), TensorDataset(X)]),
    "files": lambda rank, world: Files(PATHS[rank::world]),
    "a table": lambda rank, world: Frame(pandas.DataFrame({"x": range(SIZE)}).iloc[rank::world]),
    "uneven": lambda rank, world: Files(PATHS[: 7 + rank]),
}
SAMPLERS = {
    "SubsetRandomSampler": lambda rank, world: SubsetRandomSampler(range(rank, SIZE, world)),
    "a list": lambda rank, world: list(range(rank, SIZE, world)),
    "weights": lambda rank, world: WeightedRandomSampler([float(i % world == rank) for i in range(SIZE)], SIZE),
}


def refusals(cases):
    """Return for each case what a rank says of its own loaders: "" where it takes them."""
    import torch.distributed as dist

    def gather(value):
        values = [None] * WORLD
        dist.all_gather_object(values, value)
        return values

    found = []
    for loader_of in cases:
        try:
            check_loader(loader_of(dist.get_rank()), "loader", gather)
            found.append("")
        except LoaderError as error:
            found.append(str(error))
    return found


def test_a_dataset_that_differs_between_the_ranks_is_refused():
    """What a script has divided, and what it has drawn with another seed on each rank."""
    cases = [lambda rank, kind=kind: DataLoader(DIVIDED[kind](rank, WORLD), batch_size=2) for kind in DIVIDED]
    same = [lambda rank, kind=kind: DataLoader(DIVIDED[kind](0, 1), batch_size=2) for kind in DIVIDED]
    for texts in each_rank(WORLD, refusals, cases):
        for kind, text in zip(DIVIDED, texts, strict=True):
            assert re.search(r"differs between rank 0 and rank 1.*divided again.*loader.is_sharded = True", text), kind
    assert each_rank(WORLD, refusals, same) == [[""] * len(DIVIDED)] * WORLD


def test_a_sampler_that_differs_between_the_ranks_is_refused():
    kinds = [name for name in SAMPLERS if name != "a list"]
    cases = [lambda rank, kind=kind: over(SAMPLERS[kind](rank, WORLD)) for kind in kinds]
    same = [lambda rank, kind=kind: over(SAMPLERS[kind](0, 1)) for kind in kinds]
    for texts in each_rank(WORLD, refusals, cases):
        assert all("loader.sampler" in text and "differs between rank 0 and rank 1" in text for text in texts)
    assert each_rank(WORLD, refusals, same) == [[""] * len(kinds)] * WORLD


def test_one_value_among_many_is_found():
    """Nothing is sampled: neither of a tensor nor of a list."""
    size = 100_000

    def numbers(rank):
        values = torch.zeros(size, 1)
        values[size // 3] = rank
        return DataLoader(TensorDataset(values), batch_size=2)

    def names(rank):
        return DataLoader(Files([f"{index}{rank if index == 77_777 else 0}.png" for index in range(size)]))

    for texts in each_rank(WORLD, refusals, [numbers, names]):
        assert all("differs" in text for text in texts)


def test_lists_of_batches_are_compared():
    batches = [{"x": X[index : index + 2]} for index in range(0, SIZE, 2)]
    for divided, same in each_rank(WORLD, refusals, [lambda rank: batches[rank::2], lambda rank: list(batches)]):
        assert "loader itself differs" in divided
        assert not same


def test_what_is_alike_or_belongs_to_a_rank_is_accepted():
    """A rank may have its own paths, random streams and DistributedSampler; nothing is drawn from the streams."""

    class Augmented(Files):
        def __init__(self, rank):
            super().__init__(PATHS)
            self.rank, self.folder = rank, f"/tmp/{rank}"
            self.stream = np.random.default_rng(rank)

    def loader(rank):
        sampler = DistributedSampler(Augmented(rank), WORLD, rank)
        return DataLoader(Augmented(rank), batch_size=2, sampler=sampler, generator=torch.Generator().manual_seed(rank))

    assert each_rank(WORLD, refusals, [loader]) == [[""]] * WORLD


def test_a_cache_that_training_fills_on_each_rank_is_no_difference():
    """A second run in the process has other entries in it on each rank."""

    class Cached(Files):
        def __init__(self):
            super().__init__(PATHS)
            self.cache = [None] * SIZE

    cached = Cached()

    def fill_and_compare():
        import torch.distributed as dist

        first = refusals([lambda rank: DataLoader(cached, batch_size=2)])
        cached.cache[dist.get_rank()] = "read"
        return first + refusals([lambda rank: DataLoader(cached, batch_size=2)])

    assert each_rank(WORLD, fill_and_compare) == [["", ""]] * WORLD


def run(loader, valid=None, epochs=1, **options):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    trainer = Task.add_on(MultiGPUAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=1e-4), seed=0, log_bar=False, **options
    )
    try:
        trainer.run(epochs, loader, valid)
    except Exception as error:
        return type(error).__name__, f"{error} {getattr(error, '__notes__', '')}"
    return trainer.progress_checker.step, sorted(trainer.seen)


def test_ranks_are_refused_what_they_have_divided():
    """For training, and for validation; with is_sharded each trains on its own part."""

    def rank(kind):
        import torch.distributed as dist

        own = DataLoader(Subset(X, range(dist.get_rank(), SIZE, WORLD)), batch_size=2)
        whole = DataLoader(TensorDataset(X), batch_size=2)
        if kind == "its own":
            own.is_sharded = True
        return run(own if kind != "valid" else whole, own if kind == "valid" else None)

    for kind in ("train", "valid"):
        for name, text in each_rank(WORLD, rank, kind):
            assert name == "LoaderError"
            name = "loader" if kind == "train" else "valid_loader"
            assert f"the ranks have different data: {name}.dataset.indices differs between rank 0 and rank 1" in text
    even, odd = each_rank(WORLD, rank, "its own")
    assert even == (4, [float(each) for each in range(0, SIZE, 2)])
    assert odd == (4, [float(each) for each in range(1, SIZE, 2)])


class Noise(Dataset):
    """Says whether the function of the script was called in its worker, and draws a number."""

    has_begun = False

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(self.has_begun), torch.rand(())])


def begin_worker(worker):
    torch.utils.data.get_worker_info().dataset.has_begun = True


def test_workers_of_each_rank_draw_for_themselves_and_begin_with_the_function_of_the_script():
    """Where one generator orders the samples of all ranks, it seeds the workers of all alike."""
    draws = []
    for rank in range(WORLD):
        ranks = Ranks(rank, WORLD, lambda value: value, lambda agrees: agrees)
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(Noise(), 2, generator=generator, num_workers=1, worker_init_fn=begin_worker)
        rows = torch.cat([*shard(loader, True, ranks)])
        assert rows[:, 0].tolist() == [1.0] * 4
        draws.append(rows[:, 1])
    assert not torch.equal(*draws)


class Stream(IterableDataset):
    """Yields other numbers on each rank, and on rank 1 fewer."""

    is_sharded = True

    def __init__(self, counts):
        self.counts = counts

    def __iter__(self):
        import torch.distributed as dist

        return iter(X[: self.counts[dist.get_rank()]])


@pytest.mark.parametrize(("counts", "said"), [((12, 8), "rank 1 has ended after 4 batches"), ((8, 8), None)])
def test_a_stream_that_ends_first_on_a_rank_is_named_once(counts, said):
    def rank():
        texts = []
        handler = logging.Handler()
        handler.emit = lambda record: texts.append(record.getMessage())
        logging.getLogger("zae").addHandler(handler)
        steps, _ = run(DataLoader(Stream(counts), batch_size=2), epochs=2)
        return steps, [text for text in texts if "has ended" in text]

    (steps, texts), (others, none) = each_rank(WORLD, rank)
    assert steps == others == 8
    assert not none
    assert len(texts) == (said is not None)
    assert said is None or (said in texts[0] and "steps_per_epoch=4" in texts[0])


# ------------------------------------------------------------------------------------------- an epoch that ends early


class Missing(Dataset):
    """Has no sample 11, which a next() without a default finds out."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return next(row for row in X if int(row) == index and index != 11)


def early(**options):
    return DataLoader(Missing(), **{"batch_size": 4, **options})


EARLY = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "workers": {"num_workers": 1},
    "batches of a sampler": {"batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 4, True)},
    "distributed": {"sampler": DistributedSampler(range(SIZE), 1, 0)},
}


def plain(mode="train"):
    model = nn.Linear(1, 1)
    return Task(model, "cpu", mode, torch.optim.SGD(model.parameters(), lr=1e-4), log_bar=False)


@pytest.mark.parametrize("kind", EARLY)
def test_an_epoch_that_a_stopiteration_ends_names_the_dataset(kind):
    with pytest.raises(LoaderError, match=r"ended after \d of 4 batches.*Missing.__getitem__.*StopIteration"):
        plain().run(2, early(**EARLY[kind]))


def test_a_stopiteration_of_the_collate_fn_is_found():
    def collate(rows):
        return next(each for each in rows if float(each.sum()) > 3)

    with pytest.raises(LoaderError, match=r"ended after 0 of 4 batches.*or the collate_fn has raised StopIteration"):
        plain().run(1, DataLoader(X, batch_size=4, collate_fn=collate))


@pytest.mark.parametrize("call", ["evaluate", "inference", "run", "validation"])
def test_an_evaluation_that_a_stopiteration_ends_is_found(call):
    trainer = plain("train" if call == "validation" else "test")
    arguments = {"run": (1, early()), "validation": (1, DataLoader(X, batch_size=4), early())}.get(call, (early(),))
    with pytest.raises(LoaderError, match="ended after 2 of 4 batches"):
        getattr(trainer, "run" if call == "validation" else call)(*arguments)


@forks()
def test_on_ranks_it_is_the_dataset_that_is_named():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer = Task.add_on(MultiGPUAddon)(model, ["cpu", "cpu"], optimizer=optimizer, log_bar=False)
    with pytest.raises(LoaderError, match=r"Missing.__getitem__.*StopIteration"):
        trainer.run(1, early(batch_size=2))


class Estimates(IterableDataset):
    """Says it has more samples than it yields."""

    def __len__(self):
        return SIZE + 4

    def __iter__(self):
        return iter(X)


class Shrinks(RandomSampler):
    """A sampler of the user, whose length is an estimate."""

    def __len__(self):
        return SIZE + 4


@pytest.mark.parametrize("loader", [DataLoader(Estimates(), batch_size=4), over(Shrinks(range(SIZE)))])
def test_an_estimated_length_is_no_error(loader):
    trainer = plain()
    trainer.run(1, loader)
    assert sorted(trainer.seen) == X.reshape(-1).tolist()


@pytest.mark.parametrize("options", [{}, {"limit_batches": 2}, {"steps_per_epoch": 3}, {"max_steps": 3}])
def test_an_epoch_that_is_limited_is_no_error(options):
    plain().run(2, DataLoader(X, batch_size=4, shuffle=True, collate_fn=torch.stack), **options)


def test_batches_that_are_none_count():
    collated = iter([True, False] * 8)
    loader = DataLoader(X, batch_size=4, collate_fn=lambda rows: torch.stack(rows) if next(collated) else None)
    trainer = plain()
    trainer.run(2, loader)
    assert trainer.progress_checker.step == 4
