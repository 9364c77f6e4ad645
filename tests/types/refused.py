"""Programs that are wrong: each type checker reports every line that says so, and no other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zae import Every, Trainer
from zae.addons import EMAAddon, StateManagerAddon


class Task(Trainer):
    def train_step(self, batch: Any) -> torch.Tensor:
        return torch.as_tensor(self.modle(batch).mean())  # refused: misspelt attribute

    def test_step(self, batch: Any) -> torch.Tensor:
        return self.train_step(batch)


class Averaged(EMAAddon, Task):
    """With an add-on."""


class Saved(StateManagerAddon, Task):
    """With an add-on that has methods."""


trainer = Task(nn.Linear(2, 2), "cpu", optimizer=torch.optim.SGD, gradient_clp=1.0)  # refused: misspelt option
Task(nn.Linear(2, 2), "cpu", gradient_clip="1.0")  # refused: type of an option
Task.add_on(EMAAddon())  # refused: an instance instead of a class
trainer.run(1)  # refused: loader is missing
trainer.run(1, [], max_step=3)  # refused: misspelt argument
trainer.evaluat([])  # refused: misspelt method
print(trainer.best_path)  # refused: of an absent add-on
Averaged(nn.Linear(2, 2), decay="0.9")  # refused: type of an option
print(Saved(nn.Linear(2, 2), save_path="runs").best_pth)  # refused: misspelt attribute of an add-on
Every(step=3)  # refused: misspelt argument
