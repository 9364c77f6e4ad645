"""The Trainer of Transformers."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", WANDB_DISABLED="true")
import transformers
from harness import ACCUMULATE, CLIP, PATIENCE, Job, loss_of

NAME = "Transformers' Trainer"
PACKAGES = ("transformers", "accelerate")
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore")


class Trainer(transformers.Trainer):
    """The same loaders and the same loss; it may not wrap the batches in its own way."""

    def __init__(self, job: Job, **options: Any) -> None:
        features: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"}
        if job.features:
            features = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
            features |= {"save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
            features["gradient_accumulation_steps"] = ACCUMULATE
            options["callbacks"] = [transformers.EarlyStoppingCallback(PATIENCE)]
        arguments = transformers.TrainingArguments(
            output_dir=str(job.folder),
            num_train_epochs=job.epochs,
            max_grad_norm=CLIP if job.features else 0.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=not job.features,
            lr_scheduler_type="constant",
            **features,
        )
        self.job = job
        super().__init__(job.model, arguments, optimizers=(job.optimizer, None), **options)
        self.model_accepts_loss_kwargs = False  # Else it leaves the division by the window to the loss.

    def get_train_dataloader(self) -> Any:
        return self.job.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.job.valid

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return loss_of(model, inputs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.no_grad():
            return loss_of(model, inputs).detach(), None, None


def train(job: Job) -> None:
    Trainer(job, train_dataset=[None], eval_dataset=[None]).train()


def evaluate(job: Job) -> None:
    trainer = Trainer(job, eval_dataset=[None])
    for _ in range(job.epochs):
        trainer.evaluate()
