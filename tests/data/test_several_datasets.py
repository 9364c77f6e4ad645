"""Several datasets with weights, by torch, torchdata and Hugging Face's datasets: a killed run resumes bitwise."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, WeightedRandomSampler, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, MapStyleWrapper, MultiNodeWeightedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults, hand
from kit.faults import KillAddon, everything, forked
from zae.addons import StateManagerAddon

PARTS = {"a": hand.data(22), "b": hand.data(10, 5)}
WEIGHTS = {"a": 1.0, "b": 3.0}


def by_weighted_samples() -> Any:
    of_each_sample = [WEIGHTS[name] / len(part) for name, part in PARTS.items() for _ in range(len(part))]
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler(of_each_sample, 30, generator=generator)
    return DataLoader(ConcatDataset(PARTS.values()), batch_size=4, sampler=sampler)


def by_nodes() -> Any:
    nodes: dict[str, Any] = {
        name: MapStyleWrapper(part, DistributedSampler(part, 1, 0, seed=0)) for name, part in PARTS.items()
    }
    return Loader(Mapper(Batcher(MultiNodeWeightedSampler(nodes, WEIGHTS, seed=0), 4), default_collate))


def by_interleaved_streams() -> Any:
    streams = [
        datasets.Dataset.from_list([{"x": x.tolist(), "y": int(y)} for x, y in part]).to_iterable_dataset()
        for part in PARTS.values()
    ]
    options: dict[str, Any] = {"probabilities": [0.25, 0.75], "seed": 1, "stopping_strategy": "all_exhausted"}
    mixed = datasets.interleave_datasets(streams, **options).with_format("torch")
    return StatefulDataLoader(mixed, 4, drop_last=True, collate_fn=pairs)


def pairs(samples: list[dict[str, Any]]) -> list[Any]:
    return [torch.stack([each[name] for each in samples]) for name in "xy"]


LOADERS: dict[str, Callable[[], Any]] = {
    "WeightedRandomSampler": by_weighted_samples,
    "torchdata nodes": by_nodes,
    "interleave_datasets": by_interleaved_streams,
}


def train(folder: Path, name: str, **more: Any) -> Any:
    made = faults.build(
        faults.Task, StateManagerAddon, KillAddon, save_path=folder, save_every=2, resume="auto", **more
    )
    made.run(4, LOADERS[name]())
    return everything(made)


@pytest.mark.sample(count=1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("at", [2, 9])
@pytest.mark.parametrize("name", LOADERS)
def test_killed_in_mid_epoch_it_resumes_bitwise(name: str, at: int, tmp_path: Path) -> None:
    """In the first epoch and in a later one."""
    faults.ambient(1)
    whole = train(tmp_path / "whole", name)

    def killed() -> None:
        faults.ambient(1)
        train(tmp_path / "run", name, kill_at=at)

    assert forked(killed).status == -signal.SIGKILL
    faults.ambient(2)
    assert train(tmp_path / "run", name) == whole
