"""Scripts as users of Transformers have them: mapped datasets, collators that pad, metrics; the numbers that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from datasets import Dataset

from kit import hf
from zae import Trainer
from zae.addons import GradientAccumulationAddon, HuggingFaceAddon
from zae.addons.huggingface.transformers import from_arguments

SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-3,
            "num_train_epochs": 2}  # fmt: skip


def classification() -> Any:
    """As run_glue.py: text and an index stay in the dataset."""
    raw = {"sentence": hf.sentences()[:26], "label": [i % 3 for i in range(26)], "idx": list(range(26))}
    return Dataset.from_dict(raw).map(lambda rows: hf.tokenizer()(rows["sentence"]), batched=True)


def tags() -> Any:
    """As run_ner.py: words, a label for the tokens of each word, and tensors of three columns."""
    words = [each.split() for each in hf.sentences()[:26]]

    def encode(rows: Any) -> Any:
        encoded = hf.tokenizer()(rows["tokens"], is_split_into_words=True)
        of = [encoded.word_ids(i) for i in range(len(rows["tokens"]))]
        return {**encoded, "labels": [[-100 if at is None else at % 3 for at in each] for each in of]}

    data = Dataset.from_dict({"tokens": words, "id": list(range(26))}).map(encode, batched=True)
    data.set_format("torch", columns=["input_ids", "attention_mask", "labels"])
    return data


def accuracy(prediction: Any) -> dict[str, float]:
    found, labels = np.argmax(prediction.predictions, axis=-1), prediction.label_ids
    return {"accuracy": float((found == labels)[labels != -100].mean())}


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("head", ["sequence", "token"])
def test_a_script_moves_as_it_is(head: str, bf16: bool, tmp_path: Any, caplog: Any) -> None:
    """The same weights and metrics; the columns that are left out are named once, not at each evaluation."""
    data = classification() if head == "sequence" else tags()
    pad = {"sequence": transformers.DataCollatorWithPadding, "token": transformers.DataCollatorForTokenClassification}
    args = transformers.TrainingArguments(str(tmp_path), eval_strategy="epoch", bf16=bf16, **SETTINGS)
    given = {"train_dataset": data, "eval_dataset": data.select(range(9)), "compute_metrics": accuracy,
             "data_collator": pad[head](hf.tokenizer()), "processing_class": hf.tokenizer()}  # fmt: skip
    model, other = hf.make_model(head), hf.make_model(head)
    theirs = transformers.Trainer(other, args, **given)
    theirs.train()
    converted = from_arguments(args)
    trainer = converted.trainer(Trainer.add_on(HuggingFaceAddon), model, **given)
    converted.train(trainer)
    found, expected = trainer.evaluate(), theirs.evaluate()
    for name in ("eval_loss", "eval_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)
    for name, value in other.state_dict().items():
        assert "key.bias" in name or float((value - model.state_dict()[name]).abs().max()) <= 1e-6
    dropped = "sentence, idx" if head == "sequence" else "tokens, id"
    assert caplog.text.count(f"does not take the columns {dropped}") == 1


def losses(head: str, folder: Any, **given: Any) -> tuple[float, float]:
    """Return the mean loss of a run by Transformers, and here."""
    data = [{**row, "labels": row["input_ids"][:8] if head == "causal" else row["labels"]} for row in hf.rows(head, 24)]
    data = [{**row, "input_ids": row["input_ids"][:8], "attention_mask": row["attention_mask"][:8]} for row in data]
    args = hf.arguments(folder, num_train_epochs=1, learning_rate=0.0, **given)
    theirs = transformers.Trainer(hf.make_model(head), args, train_dataset=data).train().training_loss
    task = Trainer.add_on(HuggingFaceAddon, GradientAccumulationAddon)
    trainer = task(hf.make_model(head), "cpu", train_dataset=data, num_train_epochs=1, learning_rate=0.0, **given)
    return theirs, trainer.train().training_loss


def test_the_numbers_that_differ_are_those_of_the_guide(tmp_path: Any) -> None:
    """docs/moving/from_transformers.md: the first token of GPT-2, and a window of three batches of BERT."""
    theirs, ours = losses("causal", tmp_path)
    assert theirs == pytest.approx(7 / 8 * ours, rel=1e-5)
    theirs, ours = losses("sequence", tmp_path, gradient_accumulation_steps=3)
    assert theirs == pytest.approx(3 * ours, rel=1e-5)
