"""The snippets about training in the documents of Transformers, word for word, on tiny models.

The names of models and of sets, "bert-base-uncased" and "imdb", are folders and sets that are made here: nothing is
downloaded. ``Trainer`` is ``zae.Trainer.add_on(HuggingFaceAddon)``, which the message for ``zae.Trainer`` names. What
is no Python is left out: the commands of launchers, which tests/distributed and tests/engines start.
``push_to_hub=True`` needs a server, which tests/addons/huggingface/test_hf_saving.py has, and ``evaluate.load`` a
network: the accuracy is computed.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict

from kit import hf
from kit.snippets import changed, run, said_by
from zae import Trainer
from zae.addons import AMPAddon, CallbackAddon, CompileAddon, HuggingFaceAddon

HERE = Trainer.add_on(HuggingFaceAddon)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def names(**more: Any) -> dict[str, Any]:
    data = {"train_dataset": hf.dataset(count=16), "eval_dataset": hf.dataset(count=8)}
    args = transformers.TrainingArguments("results", num_train_epochs=1, use_cpu=True, report_to="none")
    given = {"model": hf.make_model(), "training_args": args, "Trainer": HERE, "tokenizer": hf.tokenizer(), **data}
    return {**given, "torch": torch, "np": np, "TrainingArguments": transformers.TrainingArguments, **more}


WORKFLOW = """
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainingArguments
    )
    from datasets import load_dataset

    # 1. Load and preprocess data
    dataset = load_dataset("imdb")
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")

    def tokenize_function(examples):
        return tokenizer(examples["text"], padding="max_length", truncation=True)

    tokenized_datasets = dataset.map(tokenize_function, batched=True)

    # 2. Load model
    model = AutoModelForSequenceClassification.from_pretrained(
        "bert-base-uncased",
        num_labels=2
    )

    # 3. Define training arguments
    training_args = TrainingArguments(
        output_dir="./results",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-5,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )

    # 4. Create trainer
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized_datasets["train"],
        eval_dataset=tokenized_datasets["test"],
    )

    # 5. Train
    trainer.train()

    # 6. Evaluate
    trainer.evaluate()

    # 7. Save model
    trainer.save_model("./final_model")
"""
LOCAL = ("    from datasets import load_dataset\n", "")


def sets(name: str) -> DatasetDict:
    texts = {"text": hf.sentences()[:24], "label": [len(each) % 2 for each in hf.sentences()[:24]]}
    return DatasetDict(train=Dataset.from_dict(texts), test=Dataset.from_dict(texts).select(range(8)))


def save_base(head: str, folder: str = "bert-base-uncased", labels: int = 3) -> None:
    """Save what a name of the document stands for: a tokenizer and a model, that of BERT without a head."""
    model = hf.make_model(head)
    model.config.num_labels = labels
    (model.base_model if folder.startswith("bert") else model).save_pretrained(folder)
    hf.tokenizer().save_pretrained(folder)


def test_basic_training_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of the trainer is the change; the rest is as it is written."""
    monkeypatch.setattr(hf.tokenizer(), "model_max_length", 16)
    save_base("sequence", labels=2)
    given = names(load_dataset=sets)
    ours = ("        Trainer,\n", "")
    said = said_by(WORKFLOW, {**given, "Trainer": Trainer}, LOCAL, ours)
    assert "Trainer.add_on(HuggingFaceAddon)(model, args=...)" in said
    cpu = ('output_dir="./results",', 'output_dir="./results", use_cpu=True,')
    found = run(WORKFLOW, given, LOCAL, ours, cpu)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained("final_model").state_dict()
    assert all(torch.equal(each, loaded[name]) for name, each in found["trainer"].model_state().items())
    assert found["trainer"].progress_checker.step == 6
    assert len([*Path("results").glob("step-*")]) == 3


MIXED = """
    training_args = TrainingArguments(
        output_dir="./results",
        fp16=True,  # Use fp16 on NVIDIA GPUs
        fp16_opt_level="O1",  # O0, O1, O2, O3 (Apex levels)
        # or
        bf16=True,  # Use bf16 on Ampere+ GPUs (better than fp16)
    )
"""
PARALLEL = """
    # Automatic with multiple GPUs
    training_args = TrainingArguments(
        output_dir="./results",
        per_device_train_batch_size=16,  # Per GPU
    )
"""
DEEPSPEED = """
    training_args = TrainingArguments(
        output_dir="./results",
        deepspeed="ds_config.json",  # DeepSpeed config file
    )
"""
CHECKPOINTING = """
    training_args = TrainingArguments(
        output_dir="./results",
        gradient_checkpointing=True,
    )
"""
COMPILE = """
    training_args = TrainingArguments(
        output_dir="./results",
        torch_compile=True,
        torch_compile_backend="inductor",  # or "cudagraphs"
    )
"""
HUB = """
    training_args = TrainingArguments(
        output_dir="./results",
        push_to_hub=True,
        hub_model_id="username/model-name",
        hub_strategy="every_save",  # or "end"
    )
"""
TRAIN = """
    trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset, max_steps=2)
    trainer.train()
"""
AS_DICT = ("TrainingArguments(", "dict(use_cpu=True,")


@pytest.mark.sample(count=3)
@pytest.mark.filterwarnings("ignore:.*older Transformers:FutureWarning", "ignore:.*no effect:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("text", "add_on", "changes"),
    [
        (MIXED, AMPAddon, [("bf16=True,", "")]),
        (MIXED, AMPAddon, [("fp16=True,", ""), ('fp16_opt_level="O1",', "")]),
        (PARALLEL, HuggingFaceAddon, []),
        (CHECKPOINTING, HuggingFaceAddon, []),
        (COMPILE, CompileAddon, [('"inductor"', '"eager"')]),  # A backend that needs no compiler.
    ],
    ids=["fp16", "bf16", "DataParallel", "gradient checkpointing", "torch.compile"],
)
def test_training_arguments(text: str, add_on: Any, changes: list[tuple[str, str]]) -> None:
    """Arguments that the installed Transformers has removed are taken in a dict, with a warning."""
    given = run(text, names(), AS_DICT, *changes)
    trainer = run(TRAIN, given)["trainer"]
    assert trainer.progress_checker.step == 2
    assert add_on in type(trainer).__mro__


def test_both_precisions_are_refused_by_transformers() -> None:
    given = run(MIXED, names(), AS_DICT)
    with pytest.warns(FutureWarning):
        assert "At most one of fp16 and bf16" in said_by(TRAIN, given)


def test_a_deepspeed_file_names_the_add_on() -> None:
    Path("ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    given = run(DEEPSPEED, names(), AS_DICT)
    assert "write Task.add_on(DeepSpeedAddon), deepspeed_config=..." in said_by(TRAIN, given)


def test_push_to_hub() -> None:
    """Options of HuggingFaceAddon by these names; uploads to a server are in test_hf_saving.py."""
    given = run(HUB, names(), AS_DICT)
    trainer = run("trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset)", given)["trainer"]
    assert (trainer.uploader.repo_id, trainer.uploader.strategy) == ("username/model-name", "every_save")


METRICS = """
    metric = evaluate.load("accuracy")

    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        predictions = np.argmax(logits, axis=-1)
        return metric.compute(predictions=predictions, references=labels)

    trainer = Trainer(
        model=model,
        args=training_args,
        compute_metrics=compute_metrics,
    )
"""


class Accuracy:
    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float((predictions == references).mean())}


def test_custom_metrics() -> None:
    library = SimpleNamespace(load=lambda name: Accuracy())
    assert "Trainer.add_on(HuggingFaceAddon)" in said_by(METRICS, names(Trainer=Trainer, evaluate=library))
    trainer = run(METRICS, names(evaluate=library))["trainer"]
    assert 0 <= trainer.evaluate(hf.dataset(count=8))["eval_accuracy"] <= 1


LOSS = """
    class CustomTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.logits

            # Custom loss calculation
            loss_fct = torch.nn.CrossEntropyLoss(weight=class_weights)
            loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))

            return (loss, outputs) if return_outputs else loss
"""


def test_custom_loss() -> None:
    given = run(LOSS, names(class_weights=torch.tensor([1.0, 2.0, 0.5])))
    made = changed(TRAIN, ("Trainer(", "CustomTrainer("))
    assert run(made, given)["trainer"].progress_checker.step == 2
    assert given["CustomTrainer"](given["model"], "cpu").evaluate(hf.dataset(count=8))["eval_loss"] > 0


COLLATOR = """
    from transformers import DataCollatorWithPadding

    data_collator = DataCollatorWithPadding(tokenizer=tokenizer)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        data_collator=data_collator,
    )
"""
CALLBACKS = """
    from transformers import TrainerCallback

    class CustomCallback(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            print(f"Epoch {state.epoch} completed!")
            return control

    trainer = Trainer(
        model=model,
        args=training_args,
        callbacks=[CustomCallback],
    )
"""


def test_data_collator() -> None:
    trainer = run(COLLATOR, names())["trainer"]
    assert trainer.train().global_step == 2


def test_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add it with .add_on(CallbackAddon)" in said_by(CALLBACKS, names())
    given = names(Trainer=HERE.add_on(CallbackAddon))
    trainer = run(CALLBACKS, given, ("args=training_args,", "args=training_args, train_dataset=train_dataset,"))[
        "trainer"
    ]
    trainer.train()
    assert "Epoch 1.0 completed!\n" in capsys.readouterr().out


SEARCH = """
    def model_init():
        return AutoModelForSequenceClassification.from_pretrained(
            "bert-base-uncased",
            num_labels=2
        )

    trainer = Trainer(
        model_init=model_init,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
    )

    # Optuna-based search
    best_trial = trainer.hyperparameter_search(
        direction="maximize",
        backend="optuna",
        n_trials=10,
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 5e-5, log=True),
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [8, 16, 32]),
            "num_train_epochs": trial.suggest_int("num_train_epochs", 2, 5),
        }
    )
"""


def test_hyperparameter_search() -> None:
    save_base("sequence", labels=2)

    def compute_metrics(eval_pred: Any) -> dict[str, float]:
        return {"accuracy": float((eval_pred[0].argmax(-1) == eval_pred[1]).mean())}

    data = {name: hf.dataset(count=8).map(lambda row: {"labels": row["labels"] % 2}) for name in ("train", "eval")}
    given = names(compute_metrics=compute_metrics, train_dataset=data["train"], eval_dataset=data["eval"])
    auto = {"AutoModelForSequenceClassification": transformers.AutoModelForSequenceClassification}
    best = run(SEARCH, {**given, **auto}, ("n_trials=10", "n_trials=2"))["best_trial"]
    assert set(best.hyperparameters) == {"learning_rate", "per_device_train_batch_size", "num_train_epochs"}
    assert 0 <= best.objective <= 1


PATTERNS = {
    "sequence": """
        model = AutoModelForSequenceClassification.from_pretrained(
            "bert-base-uncased",
            num_labels=num_classes,
            id2label=id2label,
            label2id=label2id
        )
    """,
    "question": 'model = AutoModelForQuestionAnswering.from_pretrained("bert-base-uncased")',
    "token": 'model = AutoModelForTokenClassification.from_pretrained("bert-base-uncased")',
    "seq2seq": 'model = AutoModelForSeq2SeqLM.from_pretrained("t5-base")',
    "causal": 'model = AutoModelForCausalLM.from_pretrained("gpt2")',
    "masked": 'model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased")',
}


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("head", PATTERNS)
def test_common_patterns(head: str) -> None:
    text = PATTERNS[head]
    save_base(head, text.split('"')[1], labels=2 if head == "question" else 3)
    labels = {0: "low", 1: "middle", 2: "high"}
    given = names(num_classes=3, id2label=labels, label2id={name: index for index, name in labels.items()})
    auto = {name: getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModelFor")}
    made = run(text, {**given, **auto, "train_dataset": hf.rows(head, 16)})
    assert run(TRAIN, made)["trainer"].progress_checker.step == 2
