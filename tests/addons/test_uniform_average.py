"""EMAAddon with averaging="uniform": stochastic weight averaging, as torch.optim.swa_utils computes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, update_bn

from kit.hand import digest, loader, network
from kit.table import Task
from zae import ConfigError
from zae.addons import EMAAddon, StateManagerAddon

START, EPOCHS = 2, 5


class Recording(Task):
    """Keep the training weights of each epoch's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends: list[Any] = []

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.ends.append(copy.deepcopy(self.unwrap()))


def make(*add_ons: Any, **options: Any) -> Any:
    model = network()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "seed": 3, "log_bar": False}
    uniform = {"averaging": "uniform", "average_start": START}
    return Recording.add_on(EMAAddon, *add_ons)(model, "cpu", **given, **uniform, **options)


def by_torch(ends: list[Any]) -> Any:
    averaged = AveragedModel(ends[0])
    for each in ends:
        averaged.update_parameters(each)
    return averaged


def test_the_average_is_that_of_torch_over_the_last_epochs() -> None:
    trainer, batches = make(), loader()
    assert any("update_batch_norm" in note for note in trainer.plan(EPOCHS, batches).notes)
    trainer.run(START, batches)
    weights = dict(trainer.unwrap().named_parameters())
    assert all(torch.equal(trainer.average[name], each) for name, each in weights.items())  # Not begun.
    assert trainer.averaged_epochs == 0
    trainer.run(EPOCHS - START, batches)
    assert trainer.averaged_epochs == EPOCHS - START
    averaged = by_torch(trainer.ends[START:])
    for name, wanted in averaged.module.named_parameters():
        assert torch.allclose(trainer.average[name], wanted, rtol=1e-6, atol=1e-7)

    # The statistics of BatchNorm, and an evaluation with them.
    fixed = [*batches]
    before, random, modes = (
        digest(trainer.unwrap()),
        torch.get_rng_state(),
        [m.training for m in trainer.model.modules()],
    )
    trainer.update_batch_norm(fixed)
    assert digest(trainer.unwrap()) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in trainer.model.modules()] == modes
    averaged.module.apply(lambda m: m.eval())
    for each in averaged.module.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    update_bn([x for x, _ in fixed], averaged.module)
    for name, wanted in averaged.module.named_buffers():
        assert torch.allclose(trainer.average[name].double(), wanted.double(), rtol=1e-5, atol=1e-6), name
    averaged.module.eval()
    x, y = fixed[0]
    with torch.no_grad():
        output = averaged.module(x)
    assert trainer.evaluate([(x, y)])["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(output, y).item(), rel=1e-4
    )


def test_a_resumed_average_is_bitwise_that_of_one_run(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def build(folder: str) -> Any:
        return make(StateManagerAddon, save_path=tmp_path / folder, resume="auto", save_every=4)

    whole, first, second = build("whole"), build("parts"), build("parts")
    whole.run(EPOCHS, loader(generator=torch.Generator().manual_seed(1)))

    class Dying(type(first)):  # type: ignore[misc]
        def on_step_begin(self, batch: Any) -> None:
            if self.progress_checker.step == 21:  # In the middle of the fourth epoch.
                raise Killed
            super().on_step_begin(batch)

    first.__class__ = Dying
    with pytest.raises(Killed):
        first.run(EPOCHS, loader(generator=torch.Generator().manual_seed(1)))
    second.run(EPOCHS, loader(generator=torch.Generator().manual_seed(1)))
    assert second.averaged_epochs == whole.averaged_epochs == EPOCHS - START
    assert all(torch.equal(each, whole.average[name]) for name, each in second.average.items())


def test_an_exponential_average_may_begin_later() -> None:
    model = network()
    trainer = Task.add_on(EMAAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), decay=0.9, average_start=1, log_bar=False
    )
    trainer.run(1, loader())
    assert all(torch.equal(trainer.average[name], each) for name, each in model.named_parameters())
    trainer.run(1, loader())
    assert not any(torch.equal(trainer.average[name], each) for name, each in model.named_parameters())


def test_options_out_of_range_are_refused() -> None:
    for options, text in (
        ({"averaging": "mean"}, "averaging='mean'; it must be 'exponential'"),
        ({"average_start": -1}, "average"),
        ({"averaging": "uniform", "decay": 0.9}, "decay=0.9 is for averaging='exponential'.*leave it out"),
    ):
        with pytest.raises(ConfigError, match=text):
            Task.add_on(EMAAddon)(network(), "cpu", optimizer=torch.optim.AdamW, **options)
