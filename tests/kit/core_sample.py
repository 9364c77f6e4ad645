"""A sample of what the core promises, for a copy of zae that lacks features: ``python core_sample.py FOLDER``.

It imports every module that is left, and names no add-on. It prints the names that `zae.addons` lists.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

import zae
from kit import hand


class Task(zae.Trainer):
    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


class Counting(zae.AddOnBase):
    """Counts the steps, and has the count saved."""

    state_attributes = ("steps_seen",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps_seen = 0

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        self.steps_seen += 1


def import_all(folder: Path) -> None:
    """Import every module of the copy."""
    for path in sorted((folder / "zae").rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] != "__main__":
            module = importlib.import_module(name)
            assert module.__file__ == str(path), f"{name} is not of the copy"


def make(cls: Any) -> Any:
    model = hand.network()
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def train(trainer: Any, n_epoch: int) -> None:
    torch.manual_seed(0)
    trainer.run(n_epoch, hand.loader(), hand.loader())


def check_run() -> None:
    """A run gives the weights of the loop by hand."""
    trainer = make(Task)
    torch.manual_seed(0)
    trainer.run(2, hand.loader())
    model = hand.network()
    torch.manual_seed(0)
    hand.train(model, torch.optim.SGD(model.parameters(), lr=0.1), hand.loader(), 2)
    assert hand.digest(trainer.model) == hand.digest(model)


def check_composition() -> None:
    """An add-on sees each step, changes no weight, and its state comes back."""
    plain, composed = make(Task), make(Task.add_on(Counting))
    train(plain, 2)
    train(composed, 2)
    assert composed.steps_seen == 12
    assert hand.digest(plain.model) == hand.digest(composed.model)
    again = make(Task.add_on(Counting))
    again.load_state_dict(composed.state_dict())
    assert again.steps_seen == 12
    assert hand.digest(again.model) == hand.digest(composed.model)


def check_weights() -> None:
    """Weights that were saved are loaded."""
    trainer = make(Task)
    train(trainer, 1)
    trainer.save_model("weights.safetensors")
    fresh = make(Task)
    fresh.apply_weights("weights.safetensors")
    assert hand.digest(fresh.model) == hand.digest(trainer.model)


def check_commands() -> None:
    """Each command that the help lists can be imported."""
    try:
        from zae import cli
    except ImportError:
        return  # It has been removed.
    for name in cli.COMMANDS:
        importlib.import_module(f"zae.cli.{name}")


def check_names() -> list[str]:
    """Every name that is listed is there, and an add-on composes with the trainer."""
    import zae.addons

    for module in (zae, zae.addons):
        for name in module.__all__:
            assert getattr(module, name) is not None
    for name in zae.addons.__all__:
        Task.add_on(getattr(zae.addons, name))
    return sorted(zae.addons.__all__)


if __name__ == "__main__":
    import_all(Path(sys.argv[1]))
    check_run()
    check_composition()
    check_weights()
    check_commands()
    print(json.dumps({"add_ons": check_names()}))
