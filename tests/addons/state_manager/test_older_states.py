"""Checkpoints of commit cbfc80a0 load: with the state of add-ons that were removed since, and with float32 copies.

No present version can write them anew. Each was saved at step 8, in the second epoch of six batches, and ``end.json``
has how far its run came.
"""

from __future__ import annotations

import copy
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from kit import frozen, hand
from kit.table import Task
from zae.addons import AMPAddon, EMAAddon, StateManagerAddon
from zae.checkpoint.reader import load_checkpoint

OLDER = frozen.FOLDER / "older"
STEP = "step-00000008"


def unpack(name: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Put a checkpoint where a run saves, and return its weights, its state and how far its run came."""
    place = folder / "save" / STEP
    with zipfile.ZipFile(OLDER / f"{name}.zip") as archive:
        archive.extractall(place)
    end = json.loads((place / "end.json").read_text())
    (place / "end.json").unlink()
    _, weights, state = load_checkpoint(place)
    return weights, state, end


def resume(folder: Path, *add_ons: Any, model: nn.Module, schedule: Any = None, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = None if schedule is None else schedule(optimizer)
    return Task.add_on(StateManagerAddon, *add_ons)(
        model,
        "cpu",
        optimizer=optimizer,
        scheduler=scheduler,
        log_bar=False,
        seed=5,
        save_path=folder / "save",
        save_every=1,
        keep_last=99,
        keep_best=0,
        overwrite=True,
        resume="auto",
        **options,
    )


def run_to_the_end(trainer: Any) -> Any:
    """Run to the third epoch, and return how far it came."""
    trainer.run(frozen.EPOCHS, hand.loader(), hand.loader(size=8, seed=4, shuffle=False))
    return frozen.end_of(trainer)


def without_norm() -> nn.Module:
    model = hand.network()
    model[1] = nn.Identity()
    return model


def half_each_epoch(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, 0.5)


REMOVED = {
    "auto_batch": (["AutoBatchAddon"], without_norm, None),
    # Its optimizer and schedule were made by the module; the network inside of it is the model now.
    "lightning_module": (["SilentFaultGuardAddon", "LightningAddon"], hand.network, half_each_epoch),
}


@pytest.mark.parametrize("name", REMOVED)
def test_the_state_of_a_removed_add_on_is_left_out_with_one_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All else is loaded, and the run goes on to its end; what it saves has no such entry."""
    add_ons, model, schedule = REMOVED[name]
    saved, state, end = unpack(name, tmp_path)
    assert {*add_ons} <= state.keys()
    trainer = resume(tmp_path, model=model(), schedule=schedule)
    trainer.setup()
    found = trainer.unwrap().state_dict()
    assert all(torch.equal(found[key.removeprefix("model.")], value) for key, value in saved.items())
    moments = trainer.optimizers["0"].state_dict()["state"]
    assert all(torch.equal(moments[0][key], value) for key, value in state["optimizer"]["0"]["state"][0].items())
    trainer.teardown()

    resumed = resume(tmp_path, model=model(), schedule=schedule)
    assert run_to_the_end(resumed)["progress"] == end["progress"]
    lines = [each.getMessage() for each in caplog.records if "zae no longer has this" in each.getMessage()]
    assert lines[0] == (f"the state of {', '.join(add_ons)} is not loaded: zae no longer has this add-on")
    assert len(lines) == 2  # One for each of the two trainers.
    assert not {*add_ons} & resumed.state_dict().keys()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_float32_copies_become_the_weights(dtype: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As they are where the model is in float32; else rounded, to the weights that were saved."""
    saved, state, end = unpack("float32_copies", tmp_path)
    copies = {
        key: state["optimizer"]["0"]["state"][index]["master"]
        for index, key in enumerate(state["order"]["0"][0])
        if "master" in state["optimizer"]["0"]["state"][index]
    }
    assert copies.keys() == {"0.weight", "0.bias", "4.weight", "4.bias"}
    options = {"dtype": dtype, "precision": "bf16", "decay": 0.75}

    def build() -> Any:
        return resume(
            tmp_path,
            AMPAddon,
            EMAAddon,
            model=hand.network(),
            schedule=lambda optimizer: CosineAnnealingLR(optimizer, 3),
            **options,
        )

    trainer = build()
    trainer.setup()
    found = trainer.unwrap().state_dict()
    for key, value in saved.items():
        expected = copies.get(key, value) if dtype is None else value
        assert found[key].dtype == expected.dtype, key
        assert torch.equal(found[key], expected), key
    for index, parameter in enumerate(trainer.unwrap().parameters()):
        values = trainer.optimizers["0"].state[parameter]
        assert values.keys() == {"step", "exp_avg", "exp_avg_sq"}
        before = state["optimizer"]["0"]["state"][index]["exp_avg"]
        assert torch.equal(values["exp_avg"], before.to(parameter.dtype))
    assert trainer.optimizers["0"].param_groups[0]["lr"] == state["optimizer"]["0"]["param_groups"][0]["lr"]
    trainer.teardown()

    resumed = build()
    assert run_to_the_end(resumed)["progress"] == end["progress"]
    (line, other) = (each.getMessage() for each in caplog.records if "float32 copies" in each.getMessage())
    assert line == other
    assert ("they stay in float32" in line) == (dtype == "bf16")


def test_float32_copies_of_tied_weights_are_those_of_each_name() -> None:
    """The state has one copy, and the weights two names."""

    def tied() -> nn.Module:
        model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2, bias=False)})
        model["other"].weight = model["one"].weight
        return model

    model = tied()
    trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False)
    content = copy.deepcopy(trainer.state_dict())
    copies = [torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([0.5, 0.6])]
    names = ["one.weight", "one.bias", "other.weight"]
    content["model"] = dict(zip(names, [each.bfloat16() for each in (*copies, copies[0])], strict=True))
    content["optimizer"]["0"]["state"] = {index: {"master": each} for index, each in enumerate(copies)}
    del content["records"]["run"]
    content["records"]["settings"] = {"optimizer": {"0": {"class": "MasterWeights"}}, "scheduler": {}}
    trainer.load_state_dict(content)
    assert torch.equal(trainer.unwrap()["one"].weight, copies[0])
    assert trainer.unwrap()["other"].weight is trainer.unwrap()["one"].weight
    assert torch.equal(trainer.unwrap()["one"].bias, copies[1])
