"""The snippets about trainers in the documents of OmniGenBench, word for word, on a tiny model.

``from omnigenbench import`` is ``from zae import``, and a GPU is the CPU. What is no Python is left out: the command
lines ``accelerate launch`` and ``accelerate config`` (tests/engines/test_accelerate.py starts them), and bodies that
are "...". ``ModelHub`` and "tensorboard" loggers of the document need a network or a service: the model is made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zae
from kit import hf
from kit.snippets import run, said_by
from zae import Trainer
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    EarlyStoppingAddon,
    GradientAccumulationAddon,
    HuggingFaceAddon,
    StateManagerAddon,
)

HERE = Trainer.add_on(HuggingFaceAddon)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 0)


def names(**more: Any) -> dict[str, Any]:
    data = {"train_dataset": hf.dataset(count=16), "eval_dataset": hf.dataset(count=8)}
    return {"model": hf.make_model(), "test_dataset": hf.dataset(count=5), "torch": torch, **data, **more}


NATIVE = """
    trainer = Trainer(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        epochs=10,
        batch_size=32,
        autocast="fp16",  # Mixed precision
        device="cuda:0",
    )

    metrics = trainer.train()
"""
# What the message of each call names.
EPOCHS = ("epochs=", "num_train_epochs=")
BATCH = ("batch_size=32", "per_device_train_batch_size=32")
CPU = ('device="cuda:0"', 'device="cpu"')
HALF = ('autocast="fp16"', 'precision="fp16"')


def test_native_trainer() -> None:
    said = said_by(NATIVE, names(Trainer=Trainer))
    for named in (
        "or the same option of HuggingFaceAddon",
        "'epochs'; here it is n_epoch of run(n_epoch, loader)",
        "'batch_size'; here it is a DataLoader with its own batch_size",
        "'autocast'; here it is precision=",
        "AMPAddon",
    ):
        assert named in said
    given = names(Trainer=HERE.add_on(AMPAddon))
    found = run(NATIVE, given, EPOCHS, BATCH, CPU, HALF)
    assert found["metrics"].global_step == 10


ACCELERATE = """
    trainer = AccelerateTrainer(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        epochs=10,
        batch_size=32,  # Per-device batch size
        autocast="fp16",
    )

    metrics = trainer.train()
"""


def test_accelerate_trainer() -> None:
    kind = HERE.add_on(AccelerateAddon)
    said = said_by(ACCELERATE, names(AccelerateTrainer=kind))
    for named in ("'epochs'; here it is num_train_epochs", "'autocast'; here it is precision="):
        assert named in said
    change = ('autocast="fp16"', 'device="cpu"')
    found = run(ACCELERATE, names(AccelerateTrainer=kind), EPOCHS, BATCH, change)
    assert found["metrics"].global_step == 10


HF_TRAINER = """
    from transformers import TrainingArguments

    training_args = TrainingArguments(
        output_dir="./results",
        num_train_epochs=10,
        per_device_train_batch_size=32,
        fp16=True,
    )

    trainer = HFTrainer(
        model=model,
        training_args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )

    metrics = trainer.train()
"""
ARGS = ("training_args=training_args", "args=training_args")
ON_CPU = ("fp16=True", "fp16=True, use_cpu=True")


def test_hf_trainer() -> None:
    said = said_by(HF_TRAINER, names(HFTrainer=HERE), ON_CPU)
    assert "'training_args'" in said
    assert "args=..." in said
    found = run(HF_TRAINER, names(HFTrainer=HERE), ON_CPU, ARGS)
    assert found["metrics"].global_step == 10
    assert AMPAddon in type(found["trainer"]).__mro__


METRICS_DICT = """
    metrics = trainer.train()
    print(metrics)  # Automatically formatted output

    # Access metrics
    best_accuracy = metrics['best_valid']['eval_accuracy']
    final_loss = metrics['train_metrics_history'][-1]['train_loss']
"""


class Classify(HERE):
    def test_step(self, batch: Any) -> Any:
        found = self.model(**batch)
        return {"loss": found.loss, "accuracy": (found.logits.argmax(1) == batch["labels"]).float().mean()}


def test_metrics_dict(capsys: pytest.CaptureFixture[str]) -> None:
    """``train`` of HuggingFaceAddon returns what Transformers does; ``run`` and ``metrics`` have these keys."""
    given = names()
    options = {"train_dataset": given["train_dataset"], "eval_dataset": given["eval_dataset"], "num_train_epochs": 2}
    trainer = Classify(given["model"], "cpu", eval_strategy="epoch", monitor="accuracy", log_bar=False, **options)
    run(METRICS_DICT, {"trainer": trainer}, ("metrics = trainer.train()", "trainer.train(); metrics = trainer.metrics"))
    assert "train_loss" in capsys.readouterr().out


DIRECTION = """
    trainer = Trainer(
        optimization_metric="loss",      # Minimizes
        # or
        optimization_metric="accuracy",  # Maximizes
    )
"""


def test_optimization_direction() -> None:
    """It names one argument twice, which Python refuses: each of the two alone."""
    for metric, direction in (("loss", "min"), ("accuracy", "max")):
        line = f'trainer = Trainer(model, optimization_metric="{metric}")'
        assert "here it is monitor" in said_by(line, names(Trainer=HERE))
        found = run(line, names(Trainer=HERE), ("optimization_metric", "monitor"))
        assert found["trainer"].history.direction == direction


EXAMPLE = """
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import CosineAnnealingLR

    # Configure optimizer and scheduler
    optimizer = AdamW(
        model.parameters(),
        lr=5e-5,
        weight_decay=0.01
    )

    scheduler = CosineAnnealingLR(
        optimizer,
        T_max=10000
    )

    # Create trainer
    trainer = Trainer(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        optimizer=optimizer,
        lr_scheduler=scheduler,

        # Training configuration
        epochs=10,
        batch_size=32,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,

        # Mixed precision
        autocast="fp16",  # or "bf16" for Ampere+ GPUs

        # Early stopping
        patience=3,
        delta=0.001,

        # Checkpointing
        save_dir="./checkpoints",
        save_steps=1000,
        save_total_limit=3,

        # Device
        device="cuda:0",
        seed=42,
    )

    # Train
    metrics = trainer.train()

    # Evaluate
    test_metrics = trainer.evaluate(test_dataset)
"""


def test_native_trainer_with_all_options() -> None:
    said = said_by(EXAMPLE, names(Trainer=Trainer))
    for named in (
        "HuggingFaceAddon",
        "GradientAccumulationAddon",
        "EarlyStoppingAddon",
        "'lr_scheduler'; here it is scheduler",
        "'save_dir'; here it is",
        "'save_steps'; here it is save_every",
        "'save_total_limit'; here it is keep_last",
    ):
        assert named in said
    kind = HERE.add_on(AMPAddon, GradientAccumulationAddon, EarlyStoppingAddon, StateManagerAddon)
    changes = (
        EPOCHS, BATCH, CPU, HALF, ("lr_scheduler=", "scheduler="), ("save_dir=", "save_path="),
        ("save_steps=1000", "save_every=Every(steps=1000)"), ("save_total_limit=", "keep_last="),
        ("patience=3", 'eval_strategy="epoch", patience=3'),
    )  # fmt: skip
    found = run(EXAMPLE, names(Trainer=kind, Every=zae.Every), *changes)
    assert 4 <= found["metrics"].global_step <= 10  # Whether it stops early is what the losses say.
    assert "eval_loss" in found["test_metrics"]
    assert [*Path("checkpoints").glob("step-*")] != []


DDP = """
    # Auto-detects all GPUs
    trainer = AccelerateTrainer(
        model=model,
        train_dataset=train_dataset,
        batch_size=32,  # Per-device batch size
    )
"""
FSDP = """
    # Enable gradient checkpointing
    model.gradient_checkpointing_enable()

    trainer = AccelerateTrainer(
        model=model,
        train_dataset=train_dataset,
        batch_size=16,
    )
"""
CHECKPOINTING = """
    # Enable gradient checkpointing
    model.gradient_checkpointing_enable()

    trainer = AccelerateTrainer(
        model=model,
        batch_size=64,  # Can use larger batches
    )
"""


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("text", [DDP, FSDP, CHECKPOINTING], ids=["DDP", "FSDP", "gradient checkpointing"])
def test_accelerate_trainer_by_its_batch_size(text: str) -> None:
    kind = HERE.add_on(AccelerateAddon)
    assert "here it is per_device_train_batch_size" in said_by(text, names(AccelerateTrainer=kind))
    found = run(text, names(AccelerateTrainer=kind), ("batch_size", "per_device_train_batch_size"))
    assert found["trainer"].loading.train_batch_size in (16, 32, 64)


ACCELERATE_EXAMPLE = """
    trainer = AccelerateTrainer(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,

        epochs=10,
        batch_size=16,  # Per-device batch size
        gradient_accumulation_steps=4,

        autocast="fp16",

        save_dir="./checkpoints",
        eval_steps=500,
        save_steps=500,
    )

    # Train
    metrics = trainer.train()

    # Only print on main process
    if trainer.accelerator.is_main_process:
        print(metrics)
"""


def test_accelerate_trainer_with_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    kind = HERE.add_on(AccelerateAddon, GradientAccumulationAddon, StateManagerAddon)
    said = said_by(ACCELERATE_EXAMPLE, names(AccelerateTrainer=kind))
    for named in ("num_train_epochs", "per_device_train_batch_size", "precision=", "save_path", "save_every"):
        assert named in said
    changes = (
        EPOCHS, ("batch_size=16", "per_device_train_batch_size=16"), ('autocast="fp16"', 'device="cpu"'),
        ("save_dir=", "save_path="), ("save_steps=500", "save_every=Every(steps=500)"),
    )  # fmt: skip
    found = run(ACCELERATE_EXAMPLE, names(AccelerateTrainer=kind, Every=zae.Every), *changes)
    assert found["metrics"].global_step == 10
    assert "TrainOutput" in capsys.readouterr().out


HF_EXAMPLE = """
    from transformers import TrainingArguments
    import numpy as np
    from sklearn.metrics import accuracy_score, f1_score

    # Define metrics
    def compute_metrics(eval_pred):
        predictions, labels = eval_pred
        predictions = np.argmax(predictions, axis=-1)

        return {
            "accuracy": accuracy_score(labels, predictions),
            "f1": f1_score(labels, predictions, average='weighted'),
        }

    # Configure training
    training_args = TrainingArguments(
        output_dir="./results",

        # Training
        num_train_epochs=10,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=5e-5,
        weight_decay=0.01,
        warmup_steps=500,

        # Evaluation
        evaluation_strategy="steps",
        eval_steps=500,

        # Saving
        save_strategy="steps",
        save_steps=500,
        save_total_limit=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_accuracy",

        # Logging
        logging_dir="./logs",
        logging_steps=100,
        report_to=["tensorboard", "wandb"],

        # Mixed precision
        fp16=True,

        # Other
        seed=42,
    )

    # Create trainer
    trainer = HFTrainer(
        model=model,
        training_args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
    )

    # Train
    train_result = trainer.train()

    # Evaluate
    eval_results = trainer.evaluate()
    test_results = trainer.evaluate(test_dataset)

    # Save
    trainer.save_model("./final_model")
    trainer.save_metrics("test", test_results)
"""


def test_hf_trainer_with_all_options() -> None:
    """Transformers itself refuses two of its former arguments; a dict of them is taken, with the present names told."""
    changes = (
        ("TrainingArguments(", "dict("), ("fp16=True,", "fp16=True, use_cpu=True,"), ARGS,
        ('["tensorboard", "wandb"]', '["tensorboard"]'),  # W&B's own tests have a server.
    )  # fmt: skip
    with pytest.warns(FutureWarning) as caught:
        found = run(
            HF_EXAMPLE, names(HFTrainer=HERE), *changes, ("    from transformers import TrainingArguments\n", "")
        )
    told = " ".join(str(each.message) for each in caught)
    assert "write eval_strategy='steps'" in told
    assert "write log_dir" in told
    assert found["train_result"].global_step == 10
    assert {"eval_accuracy", "eval_f1"} <= found["test_results"].keys()
    assert Path("final_model/model.safetensors").is_file()
    assert Path("results/test_results.json").is_file()
    assert [*Path("logs").rglob("events.*")] != []


CUSTOM = """
    class CustomTrainer(BaseTrainer):
        def _setup_training_components(self):
            \"\"\"Setup custom components\"\"\"
            self.device = torch.device("cuda")
            self.model.to(self.device)
            self.scaler = torch.cuda.amp.GradScaler()

        def _prepare_batch(self, batch):
            \"\"\"Custom batch preparation\"\"\"
            return batch.to(self.device)

        def _train_epoch(self, epoch):
            \"\"\"Custom training loop\"\"\"
            self.model.train()
            total_loss = 0

            for batch in self.train_loader:
                batch = self._prepare_batch(batch)

                with torch.cuda.amp.autocast():
                    outputs = self.model(**batch)
                    loss = outputs.loss

                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

                total_loss += loss.item()

            return total_loss / len(self.train_loader)
"""


def test_custom_trainer() -> None:
    """Its three methods are named with those that are called here; the loop of the epoch is that of zae."""
    with pytest.warns(UserWarning, match="is not called by the loop") as caught:
        run(CUSTOM, {"BaseTrainer": HERE, "torch": torch})
    told = " ".join(str(each.message) for each in caught)
    for named in ("setup()", "to_device(batch)", "run_epoch(loader)"):
        assert named in told


MULTI_TASK = """
    class MultiTaskTrainer(Trainer):
        def __init__(self, model, task_datasets, task_weights=None, **kwargs):
            self.task_datasets = task_datasets
            self.task_weights = task_weights or {t: 1.0 for t in task_datasets}
            super().__init__(model, **kwargs)

        def _train_epoch(self, epoch):
            self.model.train()
            total_loss = 0

            for task_name, dataset in self.task_datasets.items():
                task_weight = self.task_weights[task_name]
                # ... train on each task

            return total_loss
"""


def test_multi_task_trainer() -> None:
    """Its loop is left out of the document; the class and its options are made as they are."""
    with pytest.warns(UserWarning, match=r"_train_epoch .* run_epoch\(loader\)"):
        made = run(MULTI_TASK, {"Trainer": HERE})["MultiTaskTrainer"]
    trainer = made(hf.make_model(), {"a": hf.dataset(), "b": hf.dataset()}, device="cpu")
    assert trainer.task_weights == {"a": 1.0, "b": 1.0}


LOADING = """
    # 1. Efficient data loading
    trainer = Trainer(
        num_workers=8,
        pin_memory=True,
        prefetch_factor=2,
    )
"""


def test_efficient_data_loading() -> None:
    said = said_by(LOADING, {"Trainer": HERE})
    for name in ("num_workers", "pin_memory", "prefetch_factor"):
        assert f"'{name}'; here it is dataloader_{name}" in said
    changes = tuple((f"{name}=", f"dataloader_{name}=") for name in ("num_workers", "pin_memory", "prefetch_factor"))
    found = run(LOADING, names(Trainer=HERE), ("Trainer(", "Trainer(model=model,"), *changes)
    assert (found["trainer"].loading.num_workers, found["trainer"].loading.prefetch_factor) == (8, 2)


PERFORMANCE = """
    # 2. PyTorch 2.0 compilation
    model = torch.compile(model)

    # 4. Mixed precision
    trainer = Trainer(autocast="bf16")  # More stable than fp16
"""


def test_performance() -> None:
    assert "precision=" in said_by(PERFORMANCE, names(Trainer=HERE))
    change = ('Trainer(autocast="bf16")', 'Trainer(model=model, precision="bf16")')
    found = run(PERFORMANCE, names(Trainer=HERE.add_on(AMPAddon)), change)
    assert found["trainer"].precision == "bf16"
