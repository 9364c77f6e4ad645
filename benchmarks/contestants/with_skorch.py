"""skorch's NeuralNet."""

from __future__ import annotations

from typing import Any

import skorch
from harness import ACCUMULATE, CLIP, PATIENCE, Job
from skorch.callbacks import Checkpoint, EarlyStopping, GradientNormClipping, ProgressBar
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn, no_grad, zeros

NAME = "skorch"
PACKAGES = ("skorch",)


class Net(skorch.NeuralNet):
    """The same optimizer and the same loaders."""

    job: Job

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer_ = self.job.optimizer
        return self

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        return self.job.loader if training else self.job.valid

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        if not self.job.features:
            return super().train_step(batch, **fit_params)
        count = len(self.job.loader)
        index = getattr(self, "done", 0) % count
        self.done = index + 1
        window = min(ACCUMULATE, count - index // ACCUMULATE * ACCUMULATE)
        step = self.train_step_single(batch, window=window, **fit_params)
        if (index + 1) % ACCUMULATE == 0 or index + 1 == count:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step

    def train_step_single(self, batch: Any, window: int = 1, **fit_params: Any) -> Any:
        self._set_training(True)
        inputs, targets = batch
        prediction = self.infer(inputs)
        loss = self.get_loss(prediction, targets, X=inputs, training=True)
        (loss / window if window > 1 else loss).backward()
        self.notify("on_grad_computed", named_parameters=list(self.module_.named_parameters()), batch=batch)
        return {"loss": loss, "y_pred": prediction}


def net_of(job: Job) -> Net:
    callbacks: list[Any] = []
    if job.features:
        callbacks = [Clip(CLIP), EarlyStopping(patience=PATIENCE), Checkpoint(dirname=str(job.folder)), ProgressBar()]
    net = Net(
        job.model, nn.CrossEntropyLoss, max_epochs=job.epochs, verbose=0, callbacks=callbacks,
        train_split=predefined_split(Dataset(zeros(1, 1), zeros(1))) if job.features else None,
    )  # fmt: skip
    net.job = job
    return net.initialize()


class Clip(GradientNormClipping):
    """Clips where a window ends, not at each of its batches."""

    def on_grad_computed(self, net: Any, named_parameters: Any, **kwargs: Any) -> None:
        count = len(net.job.loader)
        if net.done % ACCUMULATE == 0 or net.done == count:
            super().on_grad_computed(net, named_parameters=named_parameters, **kwargs)


def train(job: Job) -> None:
    net_of(job).partial_fit(zeros(1, 1), zeros(1))


def evaluate(job: Job) -> None:
    net = net_of(job)
    with no_grad():
        for _ in range(job.epochs):
            for batch in job.valid:
                net.validation_step(batch)["loss"].item()
