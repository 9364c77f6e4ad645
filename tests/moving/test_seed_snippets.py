"""The snippets about training in the documents of OmniGenBench, Forgather and Transformers, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy

import zae
from kit import hf
from kit.ranks import on_ranks
from zae import Trainer
from zae.addons import (
    AMPAddon,
    CallbackAddon,
    EarlyStoppingAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    HuggingFaceAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.addons.huggingface.transformers import from_arguments

TESTS = Path(__file__).parents[1]

SNIPPETS = """
OmniGenBench
  Quick start: Native Trainer: test_quick_start_in_half_precision
  Quick start: Accelerate Trainer: test_one_vocabulary_on_one_process_on_several_and_sharded
  Quick start: HuggingFace Trainer: test_the_hf_trainer_of_omnigenbench
  MetricsDict: test_the_native_trainer_of_omnigenbench
  Optimization direction: test_the_direction_follows_from_the_metric
  Native trainer: test_the_native_trainer_of_omnigenbench
  Multi-GPU (DDP): test_one_vocabulary_on_one_process_on_several_and_sharded
  DeepSpeed: test_devices_and_processes
  FSDP: test_one_vocabulary_on_one_process_on_several_and_sharded
  AccelerateTrainer: test_one_vocabulary_on_one_process_on_several_and_sharded
  HFTrainer: test_the_hf_trainer_of_omnigenbench test_the_arguments_of_omnigenbench
  Custom trainer: test_the_override_points_of_omnigenbench_are_named
  Multi-task learning: test_an_example_reaches_its_floor
  Gradient checkpointing: test_the_settings_of_its_performance_section
  Performance optimization: test_the_settings_of_its_performance_section
Forgather
  add_callback, pop_callback, remove_callback: test_the_base_trainer_of_forgather
  BaseTrainer: test_the_base_trainer_of_forgather
  Trainer: test_the_factories_of_forgather test_a_class_and_its_arguments_are_refused_with_the_line
  TrainingArguments: test_the_arguments_of_forgather
  AccelTrainer: test_each_option_of_another_trainer_is_taken_or_explained
  AccelTrainingArguments: test_the_arguments_of_forgather
  PipelineTrainer: test_each_option_of_another_trainer_is_taken_or_explained
  PipelineTrainingArguments: test_the_arguments_of_forgather
  TrainerState: test_the_base_trainer_of_forgather
  TrainerControl: test_the_base_trainer_of_forgather test_a_flag_is_obeyed_at_its_step
  Optimizer factory: test_the_factories_of_forgather test_groups_by_name
  LR scheduler factory: test_the_factories_of_forgather
  Checkpoints: test_a_resume_takes_the_newest_checkpoint_that_is_whole
  Exceptions: test_the_exceptions_of_forgather
Transformers
  Basic training workflow: test_the_basic_workflow_of_transformers
  Mixed precision: test_the_arguments_of_the_tutorial
  DataParallel: test_devices_and_processes
  DistributedDataParallel: test_devices_and_processes test_two_ranks_train_as_one
  DeepSpeed: test_devices_and_processes
  Gradient checkpointing: test_the_arguments_of_the_tutorial test_the_model_is_changed_as_the_arguments_say
  torch.compile: test_the_arguments_of_the_tutorial
  Push to Hub: test_strategies
  Custom metrics: test_custom_loss_metrics_collator_and_callback
  Custom loss: test_custom_loss_metrics_collator_and_callback
  Data collator: test_custom_loss_metrics_collator_and_callback
  Callbacks: test_custom_loss_metrics_collator_and_callback
  Hyperparameter search: test_hyperparameter_search_with_arguments test_each_trial_has_its_own_folder_and_options
  Classification: test_the_common_patterns
  Question answering: test_the_common_patterns
  Token classification: test_the_common_patterns
  Sequence-to-sequence: test_the_common_patterns
  Causal language modeling: test_the_common_patterns
  Masked language modeling: test_the_common_patterns
"""
"""Each snippet of the documents, and the tests that write it with zae."""

Task = Trainer.add_on(HuggingFaceAddon)
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model_state().items()}


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def compute_metrics(eval_pred: Any) -> dict[str, Any]:
    predictions, labels = eval_pred
    predictions = np.argmax(predictions, axis=-1)
    return {
        "accuracy": accuracy_score(labels, predictions),
        "f1": f1_score(labels, predictions, average="weighted"),
    }


def test_every_snippet_has_a_test() -> None:
    named = {name for line in SNIPPETS.splitlines() if line[:2] == "  " for name in line.rpartition(": ")[2].split()}
    assert len(SNIPPETS.split("\n  ")) > 45
    code = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert {name for name in named if f"def {name}(" not in code} == set()


# --------------------------------------------------------------------------------------------------- OmniGenBench


def vocabulary(**more: Any) -> dict[str, Any]:
    """The options that its native, Accelerate and HF trainers share, each by its one name here."""
    shared = {
        "train_dataset": hf.rows(count=16), "eval_dataset": hf.rows(count=6), "num_train_epochs": 2,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "patience": 3, "seed": 42,
        "eval_strategy": "epoch", "keep_last": 3, **SGD,
    }  # fmt: skip
    return {**shared, **more}


COMMON = (GradientAccumulationAddon, StateManagerAddon, EarlyStoppingAddon)


@pytest.mark.exhaustive
@on_ranks(2)
def test_one_vocabulary_on_one_process_on_several_and_sharded(world: int, tmp_path: Path) -> None:
    """Quick starts, the examples of DDP and FSDP: one add-on more, the other lines as they are."""
    assert torch.distributed.get_world_size() == world == 2
    made, rank = {}, torch.distributed.get_rank()
    for name, engine, batch in (("native", [], 8), ("ddp", [MultiGPUAddon], 4), ("fsdp", [FSDPAddon], 4)):
        model = hf.make_model()
        if name == "fsdp":
            model.activation_checkpointing_enable()  # gradient_checkpointing_enable in older versions.
        folder = tmp_path / (name if engine else f"{name}-{rank}")
        options = vocabulary(per_device_train_batch_size=batch, save_path=folder)
        trainer = Task.add_on(*COMMON, *engine)(model, "cpu", **options)
        metrics = trainer.train()
        assert trainer.world_size == (world if engine else 1)
        assert trainer.is_main == (not engine or rank == 0)  # Of `if trainer.accelerator.is_main_process`.
        assert metrics.global_step == 2
        assert [path.name for path in folder.glob("step-*")] != []
        made[name] = weights(trainer)
    assert difference(made["native"], hf.make_model().state_dict()) > 1e-3
    assert difference(made["native"], made["ddp"]) <= 1e-6
    assert difference(made["native"], made["fsdp"]) <= 1e-6


def test_the_hf_trainer_of_omnigenbench(tmp_path: Path) -> None:
    """Its example: arguments, metrics, the best model at the end, evaluate() on two sets, folder and metrics saved."""
    converted = from_arguments(
        transformers.TrainingArguments(
            str(tmp_path / "results"), num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            learning_rate=1e-2, weight_decay=0.01, warmup_steps=2, eval_strategy="steps", eval_steps=4,
            save_strategy="steps", save_steps=4, save_total_limit=3, load_best_model_at_end=True,
            metric_for_best_model="eval_accuracy", logging_steps=4, report_to="none", seed=42, use_cpu=True,
        )
    )  # fmt: skip
    data = {"train_dataset": hf.dataset(count=16), "eval_dataset": hf.dataset(count=8)}
    trainer = converted.trainer(Task, hf.make_model(), compute_metrics=compute_metrics, **data)
    result = converted.train(trainer)
    rows = result["valid_metrics_history"]
    assert [row["step"] for row in rows] == [4, 8]
    found = trainer.evaluate()
    assert found["eval_accuracy"] == max(row["valid_accuracy"] for row in rows)
    assert found["eval_f1"] in [row["valid_f1"] for row in rows]
    tested = trainer.evaluate(hf.dataset(count=5))
    assert {"eval_loss", "eval_accuracy", "eval_f1"} <= tested.keys()
    trainer.save_model(tmp_path / "final_model")
    trainer.save_metrics("test", tested)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final_model")
    assert difference(dict(loaded.state_dict()), weights(trainer)) == 0
    assert (tmp_path / "results" / "test_results.json").is_file()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_quick_start_in_half_precision(precision: str) -> None:
    data = {"train_dataset": hf.rows(count=8), "eval_dataset": hf.rows(count=4)}
    trainer = Task.add_on(AMPAddon)(hf.make_model(), "cpu", precision=precision, num_train_epochs=2, **data, **SGD)
    assert trainer.train().metrics["epoch"] == 2
    assert 0 < difference(weights(trainer), hf.make_model().state_dict()) < 1


def test_the_settings_of_its_performance_section() -> None:
    """Workers and prefetching; checkpointing of activations changes no weight."""
    loading = {"dataloader_num_workers": 2, "dataloader_pin_memory": True, "dataloader_prefetch_factor": 2}
    trainer = Task(hf.make_model(), "cpu", train_dataset=hf.rows(count=8), **loading)
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 2)
    found = []
    for checkpointing in (False, True):
        model = hf.make_model()
        if checkpointing:
            model.activation_checkpointing_enable()
        trainer = Task(model, "cpu", train_dataset=hf.rows(count=8), num_train_epochs=1, **SGD)
        trainer.train()
        found.append(weights(trainer))
    assert difference(*found) <= 1e-7


# ------------------------------------------------------------------------------------------------------ Forgather


class TBLogger(transformers.TrainerCallback):
    """A callback that is given what it writes to."""

    def __init__(self, summary_writer: Any) -> None:
        self.summary_writer = summary_writer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.summary_writer.append((state.global_step, logs))


STATE = """epoch global_step max_steps logging_steps eval_steps save_steps train_batch_size num_train_epochs log_history
    is_local_process_zero is_world_process_zero"""
CONTROL = "should_training_stop should_epoch_stop should_save should_evaluate should_log"


def test_the_base_trainer_of_forgather(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its constructor with arguments as a dict, its callbacks, and the fields of its state and control."""
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    class Looks:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            read = [{name: getattr(each, name) for name in names.split()}
                    for each, names in ((state, STATE), (control, CONTROL))]  # fmt: skip
            seen.append((read[0], read[1]))

    args = {"output_dir": str(tmp_path), "num_train_epochs": 2, "per_device_train_batch_size": 4, "use_cpu": True,
            "logging_steps": 2, "save_strategy": "no", "report_to": "none"}  # fmt: skip
    converted = from_arguments(args)
    trainer = converted.trainer(
        Trainer.add_on(HuggingFaceAddon, CallbackAddon),
        None,
        data_collator=transformers.default_data_collator,
        train_dataset=hf.dataset(count=8),
        eval_dataset=hf.dataset(count=4),
        processing_class=hf.tokenizer(),
        model_init=hf.make_model,
        callbacks=[Looks()],
    )
    summary: list[Any] = []
    logger = TBLogger(summary)
    trainer.add_callback(logger)
    trainer.add_callback(transformers.ProgressCallback)
    converted.train(trainer)
    assert len(seen) == 4
    state, control = seen[2]
    assert (state["epoch"], state["global_step"], state["max_steps"], state["num_train_epochs"]) == (1.5, 3, 4, 2)
    assert (state["logging_steps"], state["train_batch_size"]) == (2, 4)
    assert state["is_local_process_zero"] is state["is_world_process_zero"] is True
    assert control["should_training_stop"] is control["should_save"] is False
    assert [step for step, logs in summary if "loss" in logs] == [2, 4]
    assert trainer.pop_callback(TBLogger) is logger
    assert trainer.pop_callback(TBLogger) is None
    trainer.remove_callback(transformers.ProgressCallback)
    assert [type(each) for each in trainer.callbacks] == [Looks]
    assert set(trainer.evaluate()) >= {"eval_loss"}
    assert trainer.model_exists(tmp_path) is False
    trainer.save_model()
    assert trainer.model_exists(tmp_path) is True


def test_the_exceptions_of_forgather(tmp_path: Path) -> None:
    """Neither model nor model_init; a folder that cannot be made; settings that contradict each other."""
    with pytest.raises(zae.ConfigError, match=r"model is None; give a torch.nn.Module, or a function"):
        Task(None, "cpu", train_dataset=hf.rows())
    (tmp_path / "file").write_text("")
    with pytest.raises((zae.ConfigError, zae.CheckpointError), match="file"):
        Task.add_on(StateManagerAddon)(hf.make_model(), "cpu", train_dataset=hf.rows(), save_path=tmp_path / "file")
    with pytest.raises(zae.OptionError, match="model and model_init are both given"):
        Task(hf.make_model(), "cpu", model_init=hf.make_model)


# --------------------------------------------------------------------------------------------------- Transformers


def test_the_basic_workflow_of_transformers(tmp_path: Path) -> None:
    """Tokenize with map, train with an evaluation and a checkpoint each epoch, load the best model, save it."""
    from datasets import Dataset

    texts = Dataset.from_dict({"text": hf.sentences()[:16], "label": [len(each) % 2 for each in hf.sentences()[:16]]})

    def tokenize_function(examples: Any) -> Any:
        return hf.tokenizer()(examples["text"], padding="max_length", truncation=True, max_length=12)

    tokenized = texts.map(tokenize_function, batched=True).train_test_split(4, seed=0)
    converted = from_arguments(
        transformers.TrainingArguments(
            str(tmp_path / "results"), num_train_epochs=3, per_device_train_batch_size=4, per_device_eval_batch_size=64,
            learning_rate=2e-3, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
            use_cpu=True, report_to="none",
        )
    )  # fmt: skip
    data = {"train_dataset": tokenized["train"], "eval_dataset": tokenized["test"]}
    trainer = converted.trainer(Task, hf.make_model(), **data)
    rows = converted.train(trainer)["valid_metrics_history"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(row["valid_loss"] for row in rows), rel=1e-6)
    trainer.save_model(tmp_path / "final_model")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final_model")
    assert difference(dict(loaded.state_dict()), weights(trainer)) == 0


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


class CustomTrainer(Task):
    """As in the document."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        loss_fct = torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class CustomCallback(transformers.TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        print(f"Epoch {state.epoch} completed!")
        return control


def test_custom_loss_metrics_collator_and_callback(capsys: pytest.CaptureFixture[str]) -> None:
    """The four snippets in one trainer; its weights are those of a loop by hand."""
    ragged = [{name: each[: sum(row["attention_mask"])] if isinstance(each, list) else each
               for name, each in row.items()} for row in hf.rows(count=8)]  # fmt: skip
    collator = transformers.DataCollatorWithPadding(tokenizer=hf.tokenizer())
    trainer = CustomTrainer.add_on(CallbackAddon)(
        hf.make_model(), "cpu", train_dataset=ragged, eval_dataset=ragged, data_collator=collator,
        compute_metrics=compute_metrics, callbacks=[CustomCallback], num_train_epochs=2, max_grad_norm=0,
        per_device_train_batch_size=4, train_sampling_strategy="sequential", **SGD,
    )  # fmt: skip
    trainer.train()
    assert capsys.readouterr().out == "Epoch 1.0 completed!\nEpoch 2.0 completed!\n"
    model = hf.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in (ragged[:4], ragged[4:]) * 2:
        batch = collator(samples)
        labels = batch.pop("labels")
        cross_entropy(model(**batch).logits, labels, weight=CLASS_WEIGHTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(weights(trainer), dict(model.state_dict())) <= 1e-6
    model.eval()
    batch = collator(ragged)
    labels = batch.pop("labels")
    guesses = model(**batch).logits.argmax(1)
    assert trainer.evaluate()["eval_accuracy"] == float((guesses == labels).float().mean())


def test_hyperparameter_search_with_arguments(tmp_path: Path) -> None:
    """``model_init`` and arguments; the search replaces single ones of them."""
    converted = from_arguments(
        {"output_dir": str(tmp_path), "use_cpu": True, "num_train_epochs": 3, "learning_rate": 1e-2, "optim": "sgd",
         "weight_decay": 0.1, "save_strategy": "no", "report_to": "none"}
    )  # fmt: skip
    data = {"train_dataset": hf.dataset(count=8), "eval_dataset": hf.dataset(count=4)}
    trainer = converted.trainer(Task, model_init=hf.make_model, compute_metrics=compute_metrics, **data)
    given = converted.trainer(Task, hf.make_model(), **data)
    converted.train(given)
    named = converted.trainer(Task, model_init=hf.make_model, **data)
    converted.train(named)
    assert difference(weights(given), weights(named)) == 0
    best = trainer.hyperparameter_search(
        direction="maximize",
        backend="optuna",
        n_trials=2,
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 5e-5, log=True),
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [8, 16, 32]),
            "num_train_epochs": trial.suggest_int("num_train_epochs", 2, 5),
        },
        folder=tmp_path / "search",
    )
    assert set(best.hyperparameters) == {"learning_rate", "per_device_train_batch_size", "num_train_epochs"}
    assert 1e-5 <= best.hyperparameters["learning_rate"] <= 5e-5


CLASSES = {
    "sequence": "AutoModelForSequenceClassification",
    "question": "AutoModelForQuestionAnswering",
    "token": "AutoModelForTokenClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
}


@pytest.mark.parametrize("head", CLASSES)
def test_the_common_patterns(head: str, tmp_path: Path) -> None:
    """``from_pretrained`` with names of labels, a step of training, and the same from the folder that was saved."""
    hf.make_model(head).save_pretrained(tmp_path / "base")
    names = {0: "low", 1: "middle", 2: "high"}
    more = {"num_labels": 3, "id2label": names, "label2id": {name: index for index, name in names.items()}}
    auto = getattr(transformers, CLASSES[head])
    model = auto.from_pretrained(tmp_path / "base", **(more if head in ("sequence", "token") else {}))
    trainer = Task(model, "cpu", train_dataset=hf.rows(head, 4), num_train_epochs=1, **SGD)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = auto.from_pretrained(tmp_path / "final")
    trained = trainer.unwrap().state_dict()
    assert difference(dict(loaded.state_dict()), dict(trained)) == 0
    assert difference(dict(auto.from_pretrained(tmp_path / "base").state_dict()), dict(trained)) > 0
    if head in ("sequence", "token"):
        assert loaded.config.id2label == names
