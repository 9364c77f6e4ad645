"""`predict`: the outputs of all samples in their order, in memory or in a file that is whole or absent."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from kit.faults import forked
from kit.hand import data, digest, loader, network
from kit.limits import leave_memory
from kit.ranks import on_ranks
from kit.table import Task
from zae import AddOnBase, CheckpointError, ConfigError, StepError
from zae.addons import EMAAddon, HuggingFaceAddon, MultiGPUAddon


class Predicting(Task):
    """It predicts scores and classes, and a number of the batch."""

    def predict_step(self, batch: Any) -> Any:
        scores = self.model(batch[0])
        return {"scores": scores, "class": scores.argmax(1), "mean": scores.mean(), "of": 2}


def build(task: Any = Predicting, *add_ons: Any, **options: Any) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def returning(value: Any) -> Any:
    """Return a trainer whose ``predict_step`` returns what ``value`` makes of a batch."""
    made = build()
    made.predict_step = value
    return made


def batches(size: int = 22) -> Any:
    return loader(size, shuffle=False)


def expected(size: int = 22) -> torch.Tensor:
    model = network().eval()
    with torch.no_grad():
        return torch.cat([model(inputs) for inputs, _ in batches(size)])


def test_tensors_of_all_samples_and_nothing_of_training_changes() -> None:
    trainer = build()
    before, stream = digest(trainer.model), torch.get_rng_state()
    found = trainer.predict(batches())
    assert torch.equal(torch.get_rng_state(), stream)
    assert found.keys() == {"scores", "class"}
    assert torch.equal(found["scores"], expected())
    assert found["class"].tolist() == expected().argmax(1).tolist()
    assert (digest(trainer.model), trainer.mode, len(trainer.log_test)) == (before, "train", 0)
    assert [each["mean"].ndim for each in trainer.inference(batches())] == [0] * 6


def test_by_default_it_is_test_step_and_a_tensor_alone_is_output() -> None:
    class Tested(Task):
        def test_step(self, batch: Any) -> Any:
            return {**super().test_step(batch), "output": self.model(batch[0])}

    assert torch.equal(build(Tested).predict(batches())["output"], expected())
    alone = returning(lambda batch: network().eval()(batch[0]))
    assert torch.equal(alone.predict(batches())["output"], expected())
    assert alone.inference(batches())[0].keys() == {"output"}


def test_the_average_of_the_weights_predicts() -> None:
    trainer = build(Predicting, EMAAddon, decay=0.5)
    trainer.run(1, loader())
    with torch.no_grad():
        plain = torch.cat([trainer.model.eval()(inputs) for inputs, _ in batches()])
    assert not torch.equal(trainer.predict(batches())["scores"], plain)


class Sampling(Task):
    """It predicts with numbers of each random stream."""

    def predict_step(self, batch: Any) -> Any:
        size = len(batch[0])
        return {
            "dropout": nn.functional.dropout(torch.ones(size, 16), 0.5, training=True),
            "numpy": np.random.random(size),
            "python": torch.tensor([random.random() for _ in range(size)]),
        }


class NoiseAddon(AddOnBase):
    """Draw from a generator of an add-on."""

    layer = "loop"

    def predict_step(self, batch: Any) -> Any:
        noise = torch.rand(len(batch[0]), generator=self.generator("noise"))
        return {**super().predict_step(batch), "add-on": noise}


def test_each_seed_is_a_sample_of_its_own_and_training_draws_what_it_would() -> None:
    """All random streams, those of add-ons too; a seed gives the same again, and without one nothing has changed."""

    def train(*seeds: int | None) -> tuple[list[Any], Any]:
        trainer = build(Sampling, NoiseAddon, seed=1)
        samples = [trainer.predict(batches(), seed=seed) for seed in seeds]
        trainer.run(1, loader())
        samples += [trainer.predict(batches(), seed=seed) for seed in seeds]
        return samples, (digest(trainer.model), torch.get_rng_state(), trainer.generator("noise").get_state())

    samples, after = train(0, 1, 0, None)
    without, expected_after = train(None)
    assert after[0] == expected_after[0]
    assert all(map(torch.equal, after[1:], expected_after[1:]))
    for name in samples[0]:
        first, second, repeated, unseeded, *later = [sample[name] for sample in samples]
        assert not torch.equal(first, second), name
        assert torch.equal(first, repeated), name
        assert torch.equal(unseeded, without[0][name]), name
        assert torch.equal(first, later[0]), name
        assert torch.equal(second, later[1]), name
        assert len(first.unique(dim=0)) > len(first) / 2, "each batch has draws of its own"


def test_a_seed_in_the_other_ways_to_predict(tmp_path: Path) -> None:
    trainer = build(Sampling)
    expected_rows = trainer.predict(batches(), seed=3)["dropout"]
    found = trainer.inference(batches(), seed=3)
    assert torch.equal(torch.cat([each["dropout"] for each in found]), expected_rows)
    path = trainer.predict(batches(), tmp_path / "out.safetensors", seed=3)
    assert torch.equal(load_file(path)["dropout"], expected_rows)
    hugging = build(Sampling, HuggingFaceAddon)
    assert torch.equal(hugging.predict(batches(), seed=3)["dropout"], expected_rows)
    with pytest.raises(ConfigError, match=r"seed=-1; it must be a whole number of at least 0"):
        trainer.predict(batches(), seed=-1)


@on_ranks(2)
def test_each_rank_draws_for_itself_from_the_seed(world: int) -> None:
    trainer = build(Sampling, MultiGPUAddon)
    rows = trainer.predict(batches(16), seed=0)["dropout"]
    assert len(rows.unique(dim=0)) == 16
    assert torch.equal(trainer.predict(batches(16), seed=0)["dropout"], rows)
    assert not torch.equal(trainer.predict(batches(16), seed=1)["dropout"], rows)
    given = build(Predicting, MultiGPUAddon).predict(loader(16), seed=5)["scores"]  # Shuffled alike on both.
    assert torch.equal(given.sort(0).values, expected(16).sort(0).values)


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_a_file_has_what_memory_has(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"out.{suffix}"
    trainer = build()
    if suffix == "npy":
        trainer.predict_step = lambda batch: trainer.model(batch[0])
    for _ in range(2):  # The second one replaces the first.
        assert trainer.predict(batches(), path) == path
    read = {"npy": lambda p: {"scores": torch.from_numpy(np.load(p))}, "safetensors": load_file, "pt": torch.load}
    found = read[suffix](path)
    assert torch.equal(found["scores"], expected())
    assert ("class" in found) == (suffix != "npy")
    assert os.listdir(path.parent) == [path.name]


def test_many_samples_take_no_memory_in_a_file(tmp_path: Path) -> None:
    """200 MB are written by a process that may have 70 MB more than it has."""

    class Wide(Task):
        def predict_step(self, batch: Any) -> Any:
            return torch.full((len(batch[0]), 1 << 18), float(batch[1][0]))

    def write() -> None:
        trainer = build(Wide)
        several = [(torch.zeros(4, 4), torch.full((4,), index)) for index in range(50)]
        trainer.predict(several[:1], tmp_path / "first.npy")
        held = leave_memory(70 << 20, files=False)
        with pytest.raises(RuntimeError, match="memory"):
            torch.ones(100 << 18)
        trainer.predict(several, tmp_path / "out.npy")
        array = np.load(tmp_path / "out.npy", mmap_mode="r")
        assert array.shape == (200, 1 << 18)
        assert array[::4, 7].tolist() == list(range(50))
        del held  # Until here, nothing was free within the heap.

    outcome = forked(write)
    assert outcome.status == 0, outcome.error


@on_ranks(2, 3)
def test_the_order_is_that_of_one_process(world: int, tmp_path: Path) -> None:
    """More batches than are gathered at once, and fewer than there are ranks."""
    trainer = build(Predicting, MultiGPUAddon)
    for size in (4 * 8 * world + 4 * 3, 4 * 8 * world, 5, 3):
        assert torch.equal(trainer.predict(batches(size))["scores"], expected(size))
        path = trainer.predict(batches(size), tmp_path / f"{size}.safetensors")
        assert torch.equal(load_file(path)["scores"], expected(size))
    with trainer.ready():
        assert trainer.world_size == world
    assert dist.get_world_size() == world


REFUSED = {
    "text": (lambda batch: {"names": ["a"] * 4}, r"returned 'names', .*leave it out, or call inference\(loader\)"),
    "rows": (lambda batch: {"confusion": torch.zeros(2, 2)}, r"'confusion', .* for a batch of 4 samples"),
    "nothing": (
        lambda batch: {"loss": 1.0},
        r"no tensor with a row for each sample, only loss; write def predict_step",
    ),
    "names": (
        lambda batch: {("a" if len(batch[0]) == 4 else "b"): batch[0]},
        "returned b for a batch and a for the first; return the same entries",
    ),
    "shapes": (
        lambda batch: batch[0][:, : len(batch[0])],
        r"shape \(2,\) and torch.float32 in a batch and of shape \(4,",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("to_file", [False, True])
def test_what_has_no_row_for_each_sample_is_refused_and_leaves_no_file(
    case: str, to_file: bool, tmp_path: Path
) -> None:
    step, said = REFUSED[case]
    with pytest.raises(StepError, match=said):
        returning(step).predict(batches(), tmp_path / "out.pt" if to_file else None)
    assert not os.listdir(tmp_path)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"out.csv' has no suffix of a file of predictions; write .npy, .safetensors or .pt"
    ):
        build().predict(batches(), tmp_path / "out.csv")
    with pytest.raises(StepError, match=r"an .npy file holds one array, and predict_step returned scores, class;"):
        build().predict(batches(), tmp_path / "out.npy")
    with pytest.raises(StepError, match=r"NumPy has no torch.bfloat16; return .float\(\), or write .safetensors"):
        returning(lambda batch: batch[0].bfloat16()).predict(batches(), tmp_path / "out.npy")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        build().predict(batches(), tmp_path / "file" / "out.npy")
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_of_predict_step_names_it() -> None:
    trainer = returning(lambda batch: None)
    with pytest.raises(StepError, match="predict_step"):
        trainer.inference(batches())
    trainer.predict_step = lambda batch: nn.Linear(3, 2)(batch[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        trainer.predict(data_in_batches())
    assert "the batch was" in "".join(caught.value.__notes__)


def data_in_batches() -> list[Any]:
    return [data(4)[:]]
