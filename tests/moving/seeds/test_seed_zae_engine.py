"""The two snippets of zae-engine's document, word for word on the CPU; zae_engine.trainer.addons is zae.addons here.

The second one is a script that starts its ranks: tests/distributed/test_distributed.py runs it (examples/ddp_seed.py).
Here its definitions are executed, and its main on a machine with one device is refused by its own assertion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch.utils.data import DataLoader, TensorDataset

import zae
from kit.snippets import run, said_by

PACKAGE = ("zae_engine", "zae"), ("zae.trainer.addons", "zae.addons")
CPU = ("device='cuda'", "device='cpu'")
USAGE = """
    from zae_engine.trainer import Trainer
    from zae_engine.trainer.addons import StateManagerAddon, WandBLoggerAddon

    # Add StateManager and WandBLogger add-ons to Trainer
    MyTrainer = Trainer.add_on(StateManagerAddon, WandBLoggerAddon)

    trainer = MyTrainer(
        model=my_model,
        device='cuda',
        mode='train',
        optimizer=my_optimizer,
        scheduler=my_scheduler,
        save_path='./checkpoints',
        web_logger={"wandb": {"project": "my_project"}},
    )

    trainer.run(n_epoch=10, loader=train_loader, valid_loader=valid_loader)
"""


def steps(cls: Any) -> Any:
    """The class with the steps that the message for an abstract one shows."""

    class MyTask(cls):
        def train_step(self, batch: Any) -> Any:
            inputs, targets = batch
            return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}

        def test_step(self, batch: Any) -> Any:
            return self.train_step(batch)

    return MyTask


def test_basic_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class has no steps, against the document's own rule: the message shows them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # The client reads its variables once in a process.
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    given = {
        "my_model": model, "my_optimizer": optimizer, "train_loader": DataLoader(data, 4),
        "valid_loader": DataLoader(data, 8), "my_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }  # fmt: skip
    assert "class MyTask(Trainer):\n    def train_step(self, batch):" in said_by(USAGE, given, *PACKAGE)
    with_steps = ("MyTrainer(\n", "steps(MyTrainer)(\n")
    assert "device='cuda'" in said_by(USAGE, {**given, "steps": steps}, *PACKAGE, with_steps)
    trainer = run(USAGE, {**given, "steps": steps}, *PACKAGE, with_steps, CPU)["trainer"]
    assert (trainer.progress_checker.epoch, trainer.progress_checker.step) == (10, 40)
    assert [*Path("checkpoints").glob("step-*")] != []
    assert [*Path("wandb").glob("offline-run-*")] != []


SCRIPT = """
    import os
    import torch
    from torch.utils.data import Dataset, DataLoader
    import torch.nn as nn
    import torch.optim as optim
    from zae_engine.trainer import Trainer
    from zae_engine.trainer.addons.mpu import MultiGPUAddon
    from zae_engine.schedulers import CosineAnnealingScheduler

    # Dummy Dataset
    class DummyDataset(Dataset):
        def __init__(self, size):
            self.data = torch.rand(size, 10)
            self.labels = (self.data.mean(dim=1) > 0.5).long()

        def __len__(self):
            return len(self.data)

        def __getitem__(self, idx):
            return self.data[idx], self.labels[idx]

    # MultiGPUTrainer Definition
    class MultiGPUTrainer(Trainer.add_on(MultiGPUAddon)):
        def train_step(self, batch):
            data, labels = batch
            outputs = self.model(data)
            loss = nn.CrossEntropyLoss()(outputs, labels)
            return {'loss': loss}

        def test_step(self, batch):
            return self.train_step(batch)

    # Main function
    def main():
        device_list = [torch.device(f'cuda:{i}') for i in range(torch.cuda.device_count())]
        assert len(device_list) > 1, "This script must be run with multiple GPUs available."

        # Dataset and DataLoader
        dataset = DummyDataset(1000)
        train_loader = DataLoader(dataset, batch_size=32, shuffle=True)

        # Model, Optimizer, and Scheduler Setup
        model = nn.Linear(10, 2)
        optimizer = optim.Adam(model.parameters(), lr=0.001)
        scheduler = CosineAnnealingScheduler(optimizer=optimizer, total_iters=100)

        # Create Trainer Instance & Train
        trainer = MultiGPUTrainer(
            model=model,
            device=device_list,
            mode='train',
            optimizer=optimizer,
            scheduler=scheduler,
            init_method="tcp://localhost:12355"
        )

        trainer.run(n_epoch=10, loader=train_loader)
        torch.save(model.state_dict(), 'dummy_model_mgpu.pth')
        print("Model saved as 'dummy_model_mgpu.pth'.")

    if __name__ == "__main__":
        main()
"""


def test_training_on_several_devices() -> None:
    made = run(SCRIPT, {}, *PACKAGE)
    assert issubclass(made["MultiGPUTrainer"], zae.Trainer)
    with pytest.raises(AssertionError, match="must be run with multiple GPUs"):
        made["main"]()
    loader = DataLoader(made["DummyDataset"](64), batch_size=32)
    model = torch.nn.Linear(10, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    schedule = made["CosineAnnealingScheduler"](optimizer=optimizer, total_iters=100)
    trainer = made["MultiGPUTrainer"](
        model=model, device=[torch.device("cpu")], mode="train", optimizer=optimizer, scheduler=schedule,
        init_method="tcp://localhost:12355", log_bar=False,
    )  # fmt: skip
    assert trainer.run(n_epoch=10, loader=loader)["step"] == 20
