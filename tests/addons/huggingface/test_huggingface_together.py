"""HuggingFaceAddon with the other add-ons: resumed, on two ranks, and with those that act on the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from kit import hf
from kit.ranks import on_ranks
from zae import ConfigError, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    HuggingFaceAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.data import SeededDataset

_SETTINGS = {"optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 4, "num_train_epochs": 2}


def make(*add_ons: type, head: str = "causal", **options: Any) -> Any:
    """A trainer on the CPU, with its model and its data."""
    options = {"train_dataset": hf.dataset(head), **_SETTINGS, **options}
    return Trainer.add_on(HuggingFaceAddon, *add_ons)(hf.make_model(head), "cpu", **options)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model_state().items()}


def assert_equal(one: Any, two: Any) -> None:
    expected, found = weights(one), weights(two)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_within_an_epoch_it_is_bitwise_the_same(strategy: str, accumulate: int, tmp_path: Path) -> None:
    """From step 10 of two epochs of 6, or with accumulation from step 4 of two epochs of 3."""
    options = {"train_sampling_strategy": strategy, "gradient_accumulation_steps": accumulate, "optim": "adamw_torch"}
    add_ons = (GradientAccumulationAddon, StateManagerAddon)
    at = 10 if accumulate == 1 else 4
    whole = make(*add_ons, save_path=tmp_path / "run", save_every=at, keep_last=None, **options)
    expected = whole.train()
    assert expected.global_step == 12 // accumulate
    resumed = make(*add_ons, save_path=tmp_path / "resumed", **options)
    found = resumed.train(resume_from_checkpoint=tmp_path / "run" / f"step-{at:08d}")
    assert_equal(whole, resumed)
    assert found.global_step == expected.global_step
    assert found.training_loss == expected.training_loss
    last = make(*add_ons, save_path=tmp_path / "run", **options)
    assert last.train(resume_from_checkpoint=True).training_loss == expected.training_loss
    assert_equal(whole, last)
    with pytest.raises(ConfigError, match=r"comes after a call of run\(\).*make a new trainer"):
        last.train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"needs checkpoints.*StateManagerAddon\)\(\.\.\., save_path=folder\)"):
        make().train(resume_from_checkpoint=True)


SENTENCES = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in hf.rows("causal")]


def masking() -> Any:
    """A collator that draws from a generator of its own, which it makes with its first batch."""
    return transformers.DataCollatorForLanguageModeling(hf.tokenizer(), mlm_probability=0.5, seed=7)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collator_with_a_seed_draws_as_in_transformers(workers: int, tmp_path: Path) -> None:
    """In this process, and in workers, which have a generator each."""
    given = {"train_dataset": SENTENCES, "data_collator": masking()}
    settings = {**_SETTINGS, "dataloader_num_workers": workers}
    theirs = transformers.Trainer(hf.make_model("masked"), hf.arguments(tmp_path, **settings), **given)
    expected = theirs.train().training_loss
    ours = make(head="masked", **{**settings, **given, "data_collator": masking()})
    assert ours.train().training_loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [4, 6, 10])
def test_a_collator_with_a_seed_is_resumed(workers: int, at: int, tmp_path: Path, caplog: Any) -> None:
    """Exactly; in workers over a SeededDataset, which seeds it for each batch."""
    options: dict[str, Any] = {
        "head": "masked",
        "train_dataset": SeededDataset(SENTENCES) if workers else SENTENCES,
        "dataloader_num_workers": workers,
        "save_every": at,
        "keep_last": None,
    }
    whole = make(StateManagerAddon, save_path=tmp_path / "run", data_collator=masking(), **options)
    whole.train()
    resumed = make(StateManagerAddon, save_path=tmp_path / "resumed", data_collator=masking(), **options)
    resumed.train(resume_from_checkpoint=tmp_path / "run" / f"step-{at:08d}")
    assert_equal(whole, resumed)
    assert not [each for each in caplog.records if "exact" in each.getMessage()]


def test_with_the_add_ons_of_a_step(tmp_path: Path) -> None:
    """AMP, accumulation, EMA, the state manager and a logger; the same again is bitwise equal."""
    add_ons = (AMPAddon, GradientAccumulationAddon, EMAAddon, StateManagerAddon, JSONLLoggerAddon)
    options = {"precision": "bf16", "gradient_accumulation_steps": 2, "decay": 0.9, "eval_strategy": "epoch"}
    options["eval_dataset"] = {"one": hf.dataset("causal", 6), "two": hf.rows("causal", 5)}
    made = []
    for name in ("first", "second"):
        folders = {"save_path": tmp_path / name, "jsonl_path": tmp_path / f"{name}.jsonl"}
        made.append(make(*add_ons, **folders, **options))
        made[-1].train()
    assert_equal(*made)
    rows = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert {"train/loss", "valid/one/loss", "valid/two/loss"} <= names
    assert not torch.equal(weights(made[0])["lm_head.weight"], weights(make())["lm_head.weight"])


@on_ranks(2)
def test_two_ranks_train_as_one(world: int) -> None:
    """DDP and FSDP on unequal numbers of targets: each weighs alike, as in one process with twice the batch."""
    assert dist.get_world_size() == world == 2
    single = make(per_device_train_batch_size=8)
    expected = single.train()
    for engine in (MultiGPUAddon, FSDPAddon):
        trainer = make(engine)
        found = trainer.train()
        whole = weights(trainer)
        assert trainer.world_size == world
        assert found.global_step == expected.global_step
        assert found.training_loss == pytest.approx(expected.training_loss, rel=1e-3)
        for name, value in weights(single).items():
            assert float((whole[name] - value).abs().max()) <= 1e-6, (engine.__name__, name)
