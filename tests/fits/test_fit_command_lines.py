"""Fits: libraries that make a command line or a configuration of a signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.nn.functional import cross_entropy

from kit import hand
from zae import Trainer
from zae.addons import EMAAddon


class Classifier(Trainer):
    """A classifier of two classes."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    test_step = train_step


Task = Classifier.add_on(EMAAddon)


@pytest.mark.fits
def test_jsonargparse_reads_the_signature():
    """The options of the trainer and of its add-ons are arguments, with their types; a wrong one is refused."""
    # begin: jsonargparse
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(
        Task, "trainer", skip={"model", "optimizer", "scheduler"}, instantiate=False
    )
    parser.add_argument("--optimizer", type=Callable[[Iterable], torch.optim.Optimizer])
    line = [
        "--trainer.decay=0.9",
        "--trainer.gradient_clip=1.5",
        "--optimizer=SGD",
        "--optimizer.lr=0.5",
    ]
    given = parser.instantiate(parser.parse_args(line))
    trainer = Task(hand.network(), optimizer=given.optimizer, **given.trainer.as_dict())
    trainer.run(1, hand.loader())
    # end
    assert (trainer.decay, trainer.gradient_clip) == (0.9, 1.5)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(Exception, match=r"trainer\.decay"):
        parser.parse_args(["--trainer.decay=often", "--optimizer=SGD"])


@pytest.mark.fits
def test_tyro_fills_a_dataclass():
    """The options that a script offers are a dataclass. tyro does not read those of a composed class itself."""
    # begin: tyro
    from dataclasses import asdict, dataclass

    import tyro

    @dataclass
    class Options:
        """The options of this script."""

        decay: float = 0.99
        gradient_clip: float = 0.0
        seed: int | None = None

    options = tyro.cli(Options, args=["--decay", "0.9", "--seed", "3"])
    trainer = Task(hand.network, optimizer=torch.optim.AdamW, **asdict(options))
    # end
    assert (trainer.decay, trainer.gradient_clip, trainer.seed) == (0.9, 0.0, 3)
    assert trainer.run(1, hand.loader())["step"] == 6


@pytest.mark.fits
def test_hydra_instantiates_a_trainer(tmp_path):
    """A configuration with overrides; the optimizer is a partial function that the trainer calls."""
    (tmp_path / "train.yaml").write_text(
        f"trainer:\n  _target_: {__name__}.Task\n  decay: 0.99\n  seed: 0\n"
        "  model: {_target_: torch.nn.Linear, _args_: [4, 2]}\n"
        "  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}\n"
    )
    folder = str(tmp_path)
    # begin: hydra-core
    import hydra
    from hydra.utils import instantiate

    with hydra.initialize_config_dir(folder, version_base="1.3"):
        config = hydra.compose("train", ["trainer.decay=0.9", "trainer.optimizer.lr=0.5"])
    trainer = instantiate(config.trainer)
    trainer.run(1, hand.loader())
    # end
    assert type(trainer) is Task
    assert (trainer.decay, trainer.seed) == (0.9, 0)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
