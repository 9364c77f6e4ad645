"""Mixtures of datasets and streams: shares, what an epoch is, and a place that is exact after a kill and over ranks."""

from __future__ import annotations

import itertools
import math
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults, hand
from kit.faults import KillAddon, everything, forked
from kit.rank_tasks import Counted, Seen, build, distance, same, weights
from kit.ranks import on_ranks
from zae import CheckpointMismatch, ConfigError
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.data import Mixture


def mixture(**options: Any) -> Mixture:
    """30 samples of weight 1, and 12 of weight 2: targets 0 to 29, and 100 to 111."""
    options.setdefault("weights", {"large": 1, "small": 2})
    return Mixture({"large": numbers(30), "small": numbers(12, 100)}, **options)


def numbers(size: int, first: int = 0) -> TensorDataset:
    inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(first))
    return TensorDataset(inputs, torch.arange(first, first + size, dtype=torch.float32)[:, None])


def targets(loader: Any, epoch: int = 0) -> list[list[int]]:
    loader.batch_sampler.set_epoch(epoch) if hasattr(loader.batch_sampler, "set_epoch") else loader.sampler.set_epoch(
        epoch
    )
    return [batch[1].view(-1).int().tolist() for batch in loader]


def mixed(made: Mixture, batch_size: int = 4, **options: Any) -> Any:
    return DataLoader(made, batch_size, sampler=made.sampler(), **options)


# ---------------------------------------------------------------------------------------------------- what an epoch is


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, {"large": 6, "small": 12}),
        ({"stopping_strategy": "all_exhausted"}, {"large": 30, "small": 60}),
        ({"stopping_strategy": "all_exhausted_without_replacement"}, {"large": 30, "small": 12}),
        ({"samples_per_epoch": 10}, {"large": 3, "small": 7}),
        ({"samples_per_epoch": 900}, {"large": 300, "small": 600}),
        ({"weights": [5, 2]}, {"large": 30, "small": 12}),
        ({"weights": [0.1, 0.2], "stopping_strategy": "all_exhausted"}, {"large": 30, "small": 60}),
    ],
)
def test_an_epoch_has_each_dataset_by_its_weight(options: Any, counts: dict[str, int]) -> None:
    """Samples come at most once, at least once or once, as the strategy says; within a pass none comes twice."""
    made = mixture(**options)
    assert made.counts == counts
    seen = Counter(itertools.chain(*targets(mixed(made))))
    assert seen.total() == sum(counts.values()) == len(made.sampler())
    for name, size, first in (("large", 30, 0), ("small", 12, 100)):
        often = [seen[first + index] for index in range(size)]
        assert sum(often) == counts[name]
        assert max(often) - min(often) <= 1


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_weights_may_be_an_array(make: Any) -> None:
    assert mixture(weights=make([1.0, 2.0])).signature == mixture().signature


def test_epochs_differ_and_continue_in_each_dataset() -> None:
    """Each sample of a large dataset comes once in five epochs of six; another epoch or seed is another order."""
    made = mixture()
    epochs = [targets(mixed(made), epoch) for epoch in range(5)]
    assert sorted(each for each in itertools.chain(*itertools.chain(*epochs)) if each < 100) == list(range(30))
    assert targets(mixed(made), 1) == epochs[1] != epochs[0]
    assert targets(mixed(mixture(seed=1)), 0) != epochs[0]
    state = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    targets(mixed(made))
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) != state, "the loader's own seed"
    before = torch.get_rng_state()
    list(made.sampler())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("size", "count"), [(10, 7), (10, 9), (10, 3), (7, 20), (7, 14), (5, 5), (1, 3)])
def test_every_epoch_has_each_sample_as_often_as_the_others_or_once_more(size: int, count: int) -> None:
    """Also where a pass over the dataset ends within an epoch; and each comes in the epochs that share a pass."""
    made = Mixture([numbers(size), numbers(40)], [count, 40 - count], samples_per_epoch=40)
    assert made.counts["0"] == count
    epochs = [Counter(dict.fromkeys(range(size), 0) | Counter(made.rows(0, epoch))) for epoch in range(24)]
    assert {each.total() for each in epochs} == {count}
    assert max(max(each.values()) - min(each.values()) for each in epochs) == (count % size > 0)
    if count % size:
        shared = -(-size // (count % size))
        for first in range(0, 24 - shared, shared):
            more = sum(epochs[first : first + shared], Counter())
            assert min(more[row] for row in range(size)) > shared * (count // size)


def test_without_replacement_the_weights_say_what_comes_early() -> None:
    """A heavy small dataset is used up early, whatever its size: of the first samples its share is by weight."""
    made = Mixture(
        [numbers(2000), numbers(1000)], [1, 3], stopping_strategy="all_exhausted_without_replacement", seed=5
    )
    order = made.order(0)
    assert 0.7 < order[:800].mean() < 0.8
    assert order.sum() == 1000


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_one_dataset_each(drop_last: bool) -> None:
    """The name comes with the batch; smaller last batches are kept or left out for each dataset."""
    made = mixture(with_names=True, samples_per_epoch=33)
    sampler = made.batch_sampler(batch_size=4, drop_last=drop_last)
    batches = list(DataLoader(made, batch_sampler=sampler))
    assert len(batches) == len(sampler) == (7 if drop_last else 9)
    for names, (_, rows) in batches:
        assert len({*names}) == 1
        assert {bool(row >= 100) for row in rows} == {names[0] == "small"}
    sizes = Counter(len(names) for names, _ in batches)
    assert sizes == ({4: 7} if drop_last else {4: 7, 3: 1, 2: 1})
    assert [names[0] for names, _ in batches] != sorted(names[0] for names, _ in batches)


class Rows(Dataset[Any]):
    """Is asked for many rows at once, as datasets of Hugging Face are."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        raise AssertionError

    def __getitems__(self, rows: list[int]) -> list[int]:
        self.asked.append(rows)
        return rows


def test_a_dataset_that_takes_many_rows_is_asked_for_them_at_once() -> None:
    rows = Rows()
    made = Mixture([rows, range(100, 112)], [1, 1])
    for _ in DataLoader(made, batch_sampler=made.batch_sampler(4)):
        pass
    assert [len(each) for each in rows.asked] == [4, 4, 4]
    assert len([*DataLoader(made, 4, sampler=made.sampler())]) == 6


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mixture(weights=[1]), r"weights must have one number for each of large, small; it has \[1\]"),
        (lambda: mixture(weights={"large": 1, "smal": 1}), r"for each of large, small; it has \['large', 'smal'\]"),
        (lambda: mixture(weights=[1, 0]), r"weights\['small'\]=0; leave a dataset of weight 0 out"),
        (lambda: mixture(weights=[1, -1]), "must be a number of at least 0"),
        (lambda: mixture(weights=[1, 1e-3], samples_per_epoch=9), "has none of .*'small' .* write a larger samples_"),
        (lambda: mixture(weights=[1, 1e-3]), "none of dataset 'small' with weight 0.001; .* stopping_strategy='all_"),
        (lambda: mixture(weights=np.array([1, math.nan])), r"weights\['small'\]=nan; it must be a number"),
        (lambda: mixture(stopping_strategy="last"), "must be one of 'first_exhausted', 'all_exhausted', 'all_"),
        (lambda: mixture(stopping_strategy="all_exhausted", samples_per_epoch=3), "both say what an epoch is"),
        (lambda: Mixture([], []), "without entries|not list"),
        (lambda: Mixture([iter([])], [1]), "dataset '0' of the mixture, a list_iterator, has no samples to index"),
        (lambda: mixture().batch_sampler(7, drop_last=True), "6 samples of dataset 'large', which make no batch of 7"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize("options", [{"shuffle": True}, {}])
def test_a_loader_without_its_sampler_says_what_to_write(options: Any) -> None:
    """A shuffled or sequential loader would ignore the weights."""
    with pytest.raises(TypeError, match=r"sampler=mixture.sampler\(\)"):
        list(DataLoader(mixture(), 4, **options))
    with pytest.raises(TypeError, match=r"sampler=mixture.sampler\(\)"):
        _ = mixture()[3]


# ------------------------------------------------------------------------------------------------ resumed after a kill


def classes(**options: Any) -> Mixture:
    return Mixture({"a": hand.data(22), "b": hand.data(10, 5)}, {"a": 1, "b": 1}, **options)


def stream() -> Any:
    """The streams of Hugging Face's datasets are mixed by that library, which knows their state."""
    rows = [{"x": each[0].tolist(), "y": each[1].tolist()} for each in hand.data(22)]
    both = [datasets.Dataset.from_list(part).to_iterable_dataset() for part in (rows[:16], rows[16:])]
    mixed = datasets.interleave_datasets(both, probabilities=[0.7, 0.3], seed=1, stopping_strategy="all_exhausted")
    return mixed.with_format("torch")


def pairs(samples: list[dict[str, Any]]) -> list[Any]:
    kinds = [each.dtype for each in hand.data(1)[0]]
    return [torch.stack([each[name] for each in samples]).to(kind) for name, kind in zip("xy", kinds)]


LOADERS: dict[str, Callable[[], Any]] = {
    "samples": lambda: mixed(classes()),
    "batches of one": lambda: (lambda made: DataLoader(made, batch_sampler=made.batch_sampler(4)))(classes()),
    "workers": lambda: mixed(classes(stopping_strategy="all_exhausted"), num_workers=2),
    "stateful": lambda: (lambda made: StatefulDataLoader(made, 4, sampler=made.sampler()))(classes()),
    "stateful, workers": lambda: (
        lambda made: StatefulDataLoader(made, 4, sampler=made.sampler(), num_workers=2)
    )(classes(stopping_strategy="all_exhausted_without_replacement")),
    "stream, stateful": lambda: StatefulDataLoader(stream(), 4, drop_last=True, collate_fn=pairs),
}  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


def train(folder: Path, loader: Any, at: int, **more: Any) -> Any:
    made = faults.build(
        faults.Task, StateManagerAddon, KillAddon, save_path=folder, save_every=at, resume="auto", **more
    )
    made.run(4, loader)  # One epoch more than the last kill: what is left of a loader is that of a whole epoch.
    return everything(made)


@pytest.mark.sample(count=6, covering=("name",))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("at", [3, 5, 7, 11])
@pytest.mark.parametrize("name", list(LOADERS))
def test_killed_in_mid_epoch_it_resumes_bitwise(
    name: str, at: int, tmp_path: Path, straight: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Killed with SIGKILL after a step, a new process ends with the same state, in all its parts."""
    if name not in straight:
        faults.ambient(1)
        straight[name] = train(tmp_path / "whole", LOADERS[name](), at)

    def killed() -> None:
        faults.ambient(1)
        train(tmp_path / "run", LOADERS[name](), at, kill_at=at)

    assert forked(killed).status == -signal.SIGKILL
    faults.ambient(2)
    assert train(tmp_path / "run", LOADERS[name](), at) == straight[name]
    assert "workers" in name or "exact" not in caplog.text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mixed(classes(seed=1)), r"order of the sampler was seed 0, .* and is seed 1"),
        (
            lambda: mixed(Mixture([hand.data(22), hand.data(10, 5)], [1, 1])),
            "a: 10 of 22 samples, weight 1.* and is .*0: 10 of",
        ),
        (lambda: DataLoader(classes(), batch_sampler=classes().batch_sampler(4)), "batch sampler was BatchSampler"),
    ],
)
def test_another_mixture_is_refused(make: Callable[[], Any], text: str, tmp_path: Path) -> None:
    """A resume with another seed, other weights or another kind of batch says what differs."""
    options = {"save_path": tmp_path, "save_every": 2, "keep_last": None}
    faults.build(faults.Task, StateManagerAddon, **options).run(1, mixed(classes()))
    with pytest.raises(CheckpointMismatch, match=text):
        faults.build(faults.Task, StateManagerAddon, resume=str(tmp_path / "step-00000002"), **options).run(1, make())


def test_an_epoch_of_a_trainer_is_that_of_the_sampler() -> None:
    """One process sets the epoch as several do, so that each epoch has its own order."""
    made = mixture()
    trainer = build(Seen)
    trainer.run(3, mixed(made))
    assert trainer.seen == {epoch: [*itertools.chain(*targets(mixed(made), epoch))] for epoch in range(3)}


# ---------------------------------------------------------------------------------------------------------- over ranks


@on_ranks(2, 3)
def test_ranks_share_each_sample_once(world, tmp_path):
    """Each sample of an epoch once, a step that of one process with all batches, resumed bitwise in mid-epoch."""
    for by_source in (False, True):

        def loader(batch_size, by_source=by_source):
            made = mixture(stopping_strategy="all_exhausted")
            if by_source:
                return DataLoader(made, batch_sampler=made.batch_sampler(batch_size))
            return mixed(made, batch_size)

        def run(part, resume, save, loader=loader, by_source=by_source):
            trainer = build(
                type("Both", (Seen, Counted), {}), (MultiGPUAddon, StateManagerAddon), seed=1, save_every=save,
                keep_last=None, resume=resume, save_path=tmp_path / str(by_source) / part,
            )  # fmt: skip
            trainer.run(2, loader(3))
            return trainer

        first = run("first", False, 4)
        steps = first.progress_checker.step
        again = run("again", str(tmp_path / str(by_source) / "first" / f"step-{4 + 4 * (steps > 16):08d}"), 100)
        assert first.world_size == world
        assert same(weights(first), weights(again))
        once = mixed(mixture(stopping_strategy="all_exhausted"), 3)
        for epoch in (0, 1):
            seen = Counter(itertools.chain(*first.gather(first.seen[epoch])))
            assert seen == Counter(map(float, itertools.chain(*targets(once, epoch))))
        if not by_source:
            alone = build(Counted, seed=1)
            alone.run(2, loader(3 * world))
            assert distance(first, alone) < 1e-5


@on_ranks(2)
def test_a_mixture_is_resharded(world, tmp_path):
    """What one process has begun, two ranks finish: each remaining sample once."""
    if torch.distributed.get_rank() == 0:
        single = build(Seen, (StateManagerAddon,), seed=1, save_path=tmp_path / "one", save_every=3)
        single.run(1, mixed(mixture(), 2), max_steps=3)
        begun = single.seen[0]
    torch.distributed.barrier()
    trainer = build(
        Seen, (MultiGPUAddon, StateManagerAddon), seed=1, save_path=tmp_path / "two", reshard=True,
        resume=str(tmp_path / "one" / "step-00000003"),
    )  # fmt: skip
    trainer.run(1, mixed(mixture(), 2))
    rest = list(itertools.chain(*trainer.gather(trainer.seen[0])))
    if torch.distributed.get_rank() == 0:
        assert sorted(begun + rest) == sorted(map(float, itertools.chain(*targets(mixed(mixture())))))
