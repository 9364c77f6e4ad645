"""Programs that are right: each type checker accepts them all. They are checked, and then run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from optuna import Trial
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zae import AddOnBase, Every, MetricsDict, Trainer, ZaeError, find_lr, schedulers
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, JSONLLoggerAddon, StateManagerAddon
from zae.search import PruningAddon, search
from zae.testing import check_addon


class Digits(Trainer):
    """A task of a user's own."""

    def train_step(self, batch: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
        inputs, targets = batch
        logits = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(logits, targets), "accuracy": self.accuracy(logits, targets)}

    def test_step(self, batch: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
        return self.train_step(batch)

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(1) == targets).float().mean()


class NoiseAddon(AddOnBase):
    """An add-on of a user's own, with an option."""

    layer = "loop"

    def __init__(self, *args: Any, noise: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise = noise

    def to_device(self, batch: Any) -> Any:
        inputs, targets = super().to_device(batch)
        drawn = torch.randn(inputs.shape, generator=self.generator("noise"), device=inputs.device)
        return inputs + self.noise * drawn, targets


class Saved(EMAAddon, StateManagerAddon, Digits):
    """The class statement: the attributes of each add-on are known."""


class Longer(Digits):
    """A constructor of one's own."""

    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = weight


def make_model() -> nn.Module:
    return nn.Linear(4, 2)


def make_loader() -> DataLoader[Any]:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=4)


def plain() -> None:
    model = make_model()
    trainer = Digits(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), gradient_clip=1.0, seed=0)
    metrics: MetricsDict = trainer.run(1, make_loader(), make_loader(), valid_every=Every(steps=2))
    values: dict[str, float] = trainer.evaluate(make_loader())
    assert metrics["step"] == 4
    assert isinstance(values["loss"], float)
    trainer.plan(1, make_loader())
    print(Digits.explain())


def schedule() -> None:
    trainer = Digits(make_model, "cpu", optimizer=torch.optim.AdamW, scheduler=schedulers.cosine(warmup=0.1))
    trainer.run(1, make_loader())
    Longer(make_model, "cpu", optimizer=torch.optim.AdamW, weight=2.0).run(1, make_loader())


def composed(folder: Path) -> None:
    task = Digits.add_on(AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon, JSONLLoggerAddon, NoiseAddon)
    trainer = task(
        make_model,
        "cpu",
        optimizer=torch.optim.AdamW,
        precision="fp32",
        decay=0.9,
        gradient_accumulation_steps=2,
        save_path=folder / "composed",
        jsonl_path=folder / "log.jsonl",
        noise=0.2,
    )
    trainer.run(1, make_loader(), make_loader())
    any_trainer: Trainer = trainer
    assert any_trainer.unwrap() is not None
    assert trainer.best_path is not None
    assert trainer.accuracy(torch.eye(2), torch.tensor([0, 1])) == 1
    print(task.explain(), task.__name__)
    task.add_on("PrefetchAddon")


def stated(folder: Path) -> None:
    trainer = Saved(make_model, "cpu", optimizer=torch.optim.AdamW, decay=0.9, save_path=folder / "stated")
    trainer.run(1, make_loader())
    path: Path | None = trainer.best_path
    trainer.save_state()
    trainer.save_average(folder / "average.safetensors")
    assert path is not None


def tools(folder: Path) -> None:
    trainer = Digits(make_model, "cpu", optimizer=torch.optim.AdamW)
    print(find_lr(trainer, make_loader(), steps=10))
    check_addon(NoiseAddon, noise=0.1)

    def objective(trial: Trial) -> float:
        kind = Digits.add_on(PruningAddon)
        trained = kind(make_model, "cpu", optimizer=torch.optim.AdamW, optuna_trial=trial)
        trained.run(trial.suggest_int("epochs", 1, 2), make_loader())
        return float(trained.train_metrics["loss"])

    print(search(objective, 2, folder=folder / "search").best_params["epochs"])


def errors() -> None:
    try:
        Digits(make_model, "cpu")
    except ZaeError as error:
        print(error)
