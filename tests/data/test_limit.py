"""`limit_batches` and `overfit_batches`: a run over the first batches is the loop over these batches."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from kit import hand
from kit.faults import everything
from kit.hand import data, digest, loader, network
from kit.ranks import on_ranks
from kit.table import Task
from zae import ConfigError, LoaderError
from zae.addons import GradientAccumulationAddon, MultiGPUAddon
from zae.data.batch_limits import BatchLimits
from zae.data.sharding import shard
from zae.data.shards import Ranks


class First:
    """The first batches of a loader, as a loop by hand takes them."""

    def __init__(self, batches: Any, count: int, size: int = 0) -> None:
        self.batches, self.count, self.size = batches, count, size

    def __iter__(self) -> Any:
        return islice(iter(self.batches), self.count)

    def __len__(self) -> int:
        return min(self.count, self.size or len(self.batches))


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        return iter([data(22)[index] for index in range(22)])


class Stateful:
    """A loader that has its position in its state: the iteration after a load continues from there."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.begin, self.at = list(batches), 0, 0

    def __iter__(self) -> Any:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.begin = state["at"]


KINDS: dict[str, Any] = {
    "shuffled": lambda: loader(generator=torch.Generator().manual_seed(5)),
    "global": loader,
    "plain": lambda: loader(22, shuffle=False),
    "own batches": lambda: DataLoader(data(), batch_sampler=Batches(SequentialSampler(data()), 4, False)),
    "no batches": lambda: DataLoader([data()[i : i + 4] for i in range(0, 20, 4)], batch_size=None),
    "list": lambda: list(loader(22, shuffle=False)),
    "class": lambda: First(list(loader(22, shuffle=False)), 9),
    "stream": lambda: DataLoader(Stream(), 4),
    "stateful": lambda: Stateful(loader(22, shuffle=False)),
}


class Batches(BatchSampler):
    """A batch sampler of the user."""


def build(*add_ons: Any, **options: Any) -> Any:
    model = network()
    return Task.add_on(*add_ons)(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), log_bar=False, **options)


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("count", [3, 50])
def test_it_is_the_loop_over_the_first_batches(kind: str, accumulate: int, count: int) -> None:
    """Bitwise, with the random streams after it; and where the loader has fewer batches, the loop over all."""
    model, size = network(), 5 if kind == "no batches" else 6
    by_hand, given = KINDS[kind](), KINDS[kind]()
    torch.manual_seed(3)
    hand.train(model, SGD(model.parameters(), lr=0.1), First(by_hand, count, size), 2, accumulate=accumulate)
    drawn = torch.rand(1)
    trainer = build(GradientAccumulationAddon, gradient_accumulation_steps=accumulate)
    plan = trainer.plan(2, given, limit_batches=count)
    torch.manual_seed(3)
    trainer.run(2, given, limit_batches=count)
    assert torch.rand(1) == drawn
    assert digest(trainer.model) == digest(model)
    assert plan.last_step in (trainer.progress_checker.step, None)
    assert trainer.progress_checker.batch == 2 * min(count, size)


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [{"limit_batches": 3}, {"overfit_batches": 3}])
@pytest.mark.parametrize("at", [3, 4])
def test_a_resume_and_a_run_in_pieces(kind: str, limits: Any, at: int) -> None:
    """Sample-exact at the end of an epoch and within one, in a new process and in the same one."""
    if kind == "own batches" and "overfit_batches" in limits:
        with pytest.raises(ConfigError, match="those of its Batches"):
            build().run(1, KINDS[kind](), **limits)
        return
    trainers = [build() for _ in range(3)]
    torch.manual_seed(4)
    trainers[0].run(3, KINDS[kind](), **limits)
    torch.manual_seed(4)
    given = KINDS[kind]()
    trainers[1].run(3, given, **limits, max_steps=at)
    state = copy.deepcopy(trainers[1].state_dict())
    trainers[1].plan(1, given, limit_batches=2)
    nobody_knew = at == 3 and kind in ("stream", "stateful")  # That the epoch was at its end.
    trainers[1].run(3 if nobody_knew else 2, given, **limits)
    trainers[2].load_state_dict(state)
    trainers[2].progress_checker.run_calls.index = 0
    trainers[2].run(3, KINDS[kind](), **limits)
    whole, pieces, resumed = (everything(each) for each in trainers)
    assert resumed["model"] == whole["model"] == pieces["model"]
    assert trainers[1].progress_checker.step == trainers[2].progress_checker.step == 9


def test_overfitting_sees_the_same_samples_in_each_epoch_and_validation_is_limited_by_its_own() -> None:
    class Seen(Task):
        seen: dict[str, list[Any]]

        def train_step(self, batch: Any) -> Any:
            self.seen["train"].append(batch[0].clone())
            return super().train_step(batch)

        def test_step(self, batch: Any) -> Any:
            self.seen["test"].append(len(batch[0]))
            return super().test_step(batch)

    model = network()
    trainer = Seen(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), log_bar=False)
    trainer.seen = {"train": [], "test": []}
    trainer.run(2, loader(), {"a": loader(9), "b": list(loader(22))}, overfit_batches=2, limit_batches=(None, 2))
    first = data()[:8][0]
    assert all(torch.equal(torch.cat(trainer.seen["train"][at : at + 2]), first) for at in (0, 2))
    assert len(trainer.seen["train"]) == 4
    assert trainer.seen["test"] == [4] * 8
    trainer.run(1, loader(), loader(9), limit_batches=(1, None))
    assert (len(trainer.seen["train"]), trainer.seen["test"][8:]) == (5, [4, 4, 1])


@pytest.mark.sample(covering=1)
@on_ranks(2)
@pytest.mark.parametrize("limits", [{"limit_batches": 5}, {"overfit_batches": 5}])
@pytest.mark.parametrize("kind", ["global", "list", "own batches"])
def test_ranks_share_the_first_batches(world: int, kind: str, limits: Any) -> None:
    """Five batches on two ranks: the steps are those of one process with the same samples."""
    assert dist.get_world_size() == world
    if kind == "own batches" and "overfit_batches" in limits:
        return
    torch.manual_seed(6)
    trainer = build(MultiGPUAddon)
    trainer.model[1], trainer.model[3] = torch.nn.Identity(), torch.nn.Identity()
    plan = trainer.plan(2, KINDS[kind](), **limits)
    trainer.run(2, KINDS[kind](), **limits)
    assert trainer.progress_checker.step == 2 * 3 == (plan.last_step or 6)
    single = build()
    single.model[1], single.model[3] = torch.nn.Identity(), torch.nn.Identity()
    torch.manual_seed(6)
    pairs = []
    for _ in range(2):
        several = list(KINDS[kind]()) if "overfit_batches" not in limits else list(loader(22, shuffle=False))
        several = several[:5]
        pairs += [[torch.cat(each) for each in zip(*several[at : at + 2])] for at in range(0, 5, 2)]
    single.run(1, pairs)
    for here, there in zip(trainer.model.parameters(), single.model.parameters()):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_a_state_of_another_limit_is_refused() -> None:
    trainer = build()
    trainer.run(3, loader(), limit_batches=3, max_steps=4)
    other = build()
    other.load_state_dict(trainer.state_dict())
    other.progress_checker.run_calls.index = 0
    with pytest.raises(Exception, match="number of batches was 3 and is 4"):
        other.run(3, loader(), limit_batches=4)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"limit_batches": 0}, "limit_batches=0"),
        ({"limit_batches": 0.1}, "limit_batches=0.1"),
        ({"limit_batches": (1, 2, 3)}, r"one number of batches, or \(training, validation\)"),
        ({"overfit_batches": True}, "overfit_batches=True"),
        ({"limit_batches": 3, "overfit_batches": 2}, r"write limit_batches=\(None, 3\)"),
    ],
)
def test_limits_that_cannot_be_meant(limits: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build().run(1, loader(), **limits)


def test_an_iterator_that_comes_once_is_refused() -> None:
    for limits in ({"limit_batches": 2}, {"overfit_batches": 2}):
        with pytest.raises((ConfigError, LoaderError), match="steps_per_epoch="):
            build().run(1, iter(list(loader())), **limits)
    assert build().run(1, iter(list(loader())), loader(9), limit_batches=(None, 1))["step"] == 6


def test_a_loader_that_shards_itself_is_limited_too() -> None:
    """Each rank trains on the first batches of its own sampler; the first batches of all are evaluated, each once."""
    samples = torch.arange(20)
    evaluated: list[int] = []
    for rank in range(2):
        given = DataLoader(samples, 2, sampler=DistributedSampler(samples, 2, rank, shuffle=False))  # type: ignore[arg-type]
        ranks = Ranks(rank, 2, lambda value: value, lambda agrees: agrees)
        view = BatchLimits(3, 3).of_training(given)
        assert torch.cat([*shard(view, True, ranks)]).tolist() == [rank + 2 * each for each in range(6)]
        evaluated += torch.cat([*shard(BatchLimits(3, 3).of_validation(given), False, ranks)]).tolist()
    assert sorted(evaluated) == [*range(6)]


def test_a_dataset_that_yields_batches_is_evaluated_whole() -> None:
    """With batch_size=None an entry of the sampler is a batch, also where a DistributedSampler has chosen it."""
    batches = [torch.arange(index, index + 2) for index in range(0, 10, 2)]
    evaluated: list[torch.Tensor] = []
    for rank in range(2):
        sampler = DistributedSampler(batches, 2, rank, shuffle=False)  # type: ignore[arg-type]
        loader = DataLoader(batches, batch_size=None, sampler=sampler)  # type: ignore[arg-type]
        evaluated += shard(loader, False, Ranks(rank, 2, lambda value: value, lambda agrees: agrees))
    assert sorted(torch.cat(evaluated).tolist()) == [*range(10)]
