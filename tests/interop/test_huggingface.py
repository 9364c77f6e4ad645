"""HuggingFaceAddon against transformers.Trainer: the same weights, for six heads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainingArguments

from kit import hf
from zae import Every, Trainer
from zae.addons import GradientAccumulationAddon, HuggingFaceAddon, StateManagerAddon
from zae.errors import ConfigError, ZaeError

_SGD = {"optim": "sgd", "learning_rate": 0.1}
_ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


def theirs(head: str, folder: Any, kind: Any = transformers.Trainer, **more: Any) -> dict[str, torch.Tensor]:
    """The weights that transformers.Trainer arrives at."""
    model = hf.make_model(head)
    args = hf.arguments(folder, num_train_epochs=2, **more)
    kind(model, args, train_dataset=hf.dataset(head)).train()
    return model.state_dict()


def ours(head: str, **more: Any) -> dict[str, torch.Tensor]:
    """The weights that zae arrives at."""
    model = hf.make_model(head)
    options = {"num_train_epochs": 2, "train_dataset": hf.dataset(head), **more}
    Trainer.add_on(HuggingFaceAddon, GradientAccumulationAddon)(model, "cpu", **options).train()
    return model.state_dict()


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def without_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out attention's key biases: their gradient is zero in exact arithmetic, and AdamW steps on its rounding."""
    found = {name: value for name, value in weights.items() if not name.endswith("key.bias")}
    for name in [name for name in found if name.endswith("c_attn.bias")]:  # Queries, keys and values in one.
        found[name] = torch.cat([found[name].chunk(3)[0], found[name].chunk(3)[2]])
    return found


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("head", hf.HEADS)
def test_weights_are_those_of_transformers(head: str, tmp_path: Any) -> None:
    """Two epochs in the same random order, with clipping and a linear schedule."""
    start = hf.make_model(head).state_dict()
    expected, found = theirs(head, tmp_path, **_SGD), ours(head, **_SGD)
    assert difference(expected, found) <= 1e-6
    assert difference(start, found) > 1e-2
    expected, found = theirs(head, tmp_path, **_ADAMW), ours(head, **_ADAMW)
    assert difference(without_key_biases(expected), without_key_biases(found)) <= 1e-6


class Weighted(transformers.Trainer):
    """A trainer of Transformers with the right mean over the targets of a window, for models that do not compute it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs).loss * inputs["labels"].ne(-100).sum() / num_items_in_batch


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("head", hf.HEADS)
def test_accumulation_with_unequal_numbers_of_targets(head: str, tmp_path: Any) -> None:
    """Each target weighs alike in a window of three batches of 4 samples; the last window has two."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, **_SGD}
    found = ours(head, **settings)
    # Only causal models divide by num_items_in_batch themselves; question answering has no labels to count.
    kind = transformers.Trainer if head in ("causal", "question") else Weighted
    assert difference(theirs(head, tmp_path, kind, **settings), found) <= 1e-6
    assert difference(ours(head, **{**settings, "gradient_accumulation_steps": 1}), found) > 1e-3


@pytest.mark.parametrize(
    "given",
    [
        {"eval_strategy": "steps", "eval_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3},
        {"eval_strategy": "epoch", "eval_delay": 2},
        {"eval_strategy": "epoch", "eval_on_start": True, "num_train_epochs": 2.5},
        {"eval_strategy": "steps", "eval_steps": 0.3, "max_steps": 7},
        {"eval_strategy": "epoch", "max_steps": 7, "eval_delay": 2.5},
        {"eval_strategy": "epoch", "max_steps": 6},
    ],
    ids=str,
)
def test_train_evaluates_when_transformers_does(given: dict[str, Any], tmp_path: Any) -> None:
    options = {"num_train_epochs": 3, **_SGD, **given}
    data = {"train_dataset": hf.dataset(), "eval_dataset": hf.dataset(count=9)}
    model = hf.make_model()
    trainer = transformers.Trainer(model, hf.arguments(tmp_path, **options), **data)
    expected = trainer.train()
    evaluated = [(each["step"], each["eval_loss"]) for each in trainer.state.log_history if "eval_loss" in each]
    own = Trainer.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", **data, **options)
    found = own.train()
    assert (found.global_step, found.metrics["epoch"]) == (expected.global_step, expected.metrics["epoch"])
    assert found.training_loss == pytest.approx(expected.training_loss, abs=1e-6)
    seen = [(each["step"], each["loss"]) for each in own.history.valid]
    assert seen == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in evaluated if step]
    assert bool(own.eval_on_start) == any(step == 0 for step, _ in evaluated)


def test_the_best_weights_are_loaded_at_the_end(tmp_path: Any) -> None:
    data = {"train_dataset": hf.dataset(), "eval_dataset": hf.dataset(count=9)}
    options = {"num_train_epochs": 3, "optim": "sgd", "learning_rate": 8.0, "max_grad_norm": 0.0,
               "eval_strategy": "epoch", "load_best_model_at_end": True}  # fmt: skip
    with pytest.raises(ConfigError, match=r"load_best_model_at_end=True needs .*StateManagerAddon\)"):
        Trainer.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", **data, **options)
    trainer = Trainer.add_on(HuggingFaceAddon, StateManagerAddon)(
        hf.make_model(), "cpu", save_path=tmp_path, save_every=Every(epochs=1), **data, **options
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.history.valid]
    assert min(losses) < losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-6)


def test_a_part_of_an_epoch_needs_its_length() -> None:
    stream = hf.dataset().to_iterable_dataset()
    trainer = Trainer.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", train_dataset=stream, num_train_epochs=1.5)
    with pytest.raises(ConfigError, match=r"num_train_epochs=1\.5 of a loader without a length has no end"):
        trainer.train()


MISTAKES = [
    ({"eval_strategy": "epochs"}, r"eval_strategy='epochs'; write 'no', 'steps' or 'epoch'"),
    ({"eval_strategy": "epoch"}, r"eval_strategy='epoch' needs data; write eval_dataset=dataset"),
    ({"train_dataset": None}, r"train\(\) needs data; write .*train_dataset=dataset"),
    ({"train_dataset": hf.dataset(count=3), "dataloader_drop_last": True}, "0 batches .*drop_last=False"),
    ({"train_dataset": hf.dataset().remove_columns("labels")}, "the model returned no loss .*a column 'labels'"),
    ({"train_dataset": [{"input_ids": [1] * (i + 2), "labels": 0} for i in range(4)]}, "processing_class=tokenizer"),
    ({"device": TrainingArguments(use_cpu=True, report_to="none")}, r"from_arguments\(args\)\.trainer\("),
    ({"args": TrainingArguments(use_cpu=True, report_to="none")}, r"here it is .*from_arguments\(args\)"),
    ({"push_to_hub": True}, "push_to_hub=True uploads output_dir; write output_dir='folder'"),
]


@pytest.mark.parametrize(("given", "told"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_told_with_what_to_write(given: dict[str, Any], told: str) -> None:
    options = {"device": "cpu", "train_dataset": hf.dataset(), "num_train_epochs": 1, **given}
    with pytest.raises((ZaeError, ValueError)) as caught:
        Trainer.add_on(HuggingFaceAddon)(hf.make_model(), **options).train()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(told, said, re.S)
    assert len(str(caught.value)) < 400
