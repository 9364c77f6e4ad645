"""Scripts in the style of their users: several optimizers, samples that numpy draws, logs larger than the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zae.cli import main


def certify(capsys: pytest.CaptureFixture[str], script: str, only: str) -> dict[str, Any]:
    """Return all that is said of a script that is killed once."""
    Path("train.py").write_text(script)
    main(["certify", "--json", "--kills", "1", "--only", only, "train.py"])
    said, error = capsys.readouterr()
    assert said, error
    found: dict[str, Any] = json.loads(said)
    return found


def promise(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what is said of one promise."""
    return next(each for each in found["promises"] if each["name"] == name)


GAN = """
import os
import torch
from torch import nn

torch.manual_seed(0)
real = torch.randn(32, 4)
maker = nn.Linear(2, 4)
critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
parts = {"maker": maker, "critic": critic}
parts["of critic"] = torch.optim.Adam(critic.parameters(), 0.01)
parts["of maker"] = torch.optim.Adam(maker.parameters(), 0.01)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    for name, part in parts.items():
        if name != "FORGOTTEN":
            part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    first = state["step"]
for step in range(first, 10):
    fake = maker(torch.randn(8, 2))
    parts["of critic"].zero_grad()
    (critic(fake.detach()) - critic(real[step : step + 8])).mean().backward()
    parts["of critic"].step()
    parts["of maker"].zero_grad()
    (-critic(fake).mean()).backward()
    parts["of maker"].step()
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"random": torch.get_rng_state(), "step": step + 1}, "new.pt")
    os.replace("new.pt", "last.pt")
"""


@pytest.mark.parametrize(
    ("forgotten", "cause", "whose"),
    [
        ("maker", "weights", "Adam, optimizer 2 of 2, of weight, ..."),
        pytest.param("critic", "weights", "Adam, optimizer 1 of 2, of 0.weight, ...", marks=pytest.mark.exhaustive),
        pytest.param("of maker", "optimizer state", "Adam, optimizer 2 of 2", marks=pytest.mark.exhaustive),
        pytest.param("of critic", "optimizer state", "Adam, optimizer 1 of 2", marks=pytest.mark.exhaustive),
    ],
)
def test_of_two_optimizers_the_one_that_parts_is_named(
    forgotten: str, cause: str, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the other one steps first, with what the lost weights have made."""
    found = certify(capsys, GAN.replace("FORGOTTEN", forgotten), "resume")
    assert found["parameters"] == 2 * 4 + 4 + 4 * 8 + 8 + 8 + 1
    judged = promise(found, "resume is exact")
    assert (judged["cause"], judged["causes"]) == (cause, [cause]), judged
    assert whose in judged["message"]


DRAWS = """
import os
import numpy as np
import torch

torch.manual_seed(0)
np.random.seed(0)
data = torch.randn(24, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
epoch, batch = 0, 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt", weights_only=False)
    model.load_state_dict(state["model"])
    epoch, batch = state["next"]
while epoch < 3:
    order = np.random.permutation(24)
    for index in range(batch, 6):
        optimizer.zero_grad()
        model(data[order[4 * index : 4 * index + 4]]).square().mean().backward()
        optimizer.step()
        if (index + 1) % 6 == 0:
            state = {"model": model.state_dict(), "next": (epoch + (index == 5), (index + 1) % 6)}
            torch.save(state, "new.pt")
            os.replace("new.pt", "last.pt")
    epoch, batch = epoch + 1, 0
"""


@pytest.mark.exhaustive
def test_the_stream_that_samples_are_drawn_from_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A step itself draws nothing from it; the next order does."""
    judged = promise(certify(capsys, DRAWS, "resume"), "resume is exact")
    assert judged["causes"] == ["random state", "samples"], judged
    assert "the random states are not resumed (numpy)" in judged["message"]


LOGS = """
import os, pickle
import torch

torch.manual_seed(0)
data = torch.randn(20, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
first = 0
if os.path.exists("last.pkl"):
    with open("last.pkl", "rb") as file:
        first, state = pickle.load(file)
    model.load_state_dict(state)
for step in range(first, 20):
    optimizer.zero_grad()
    model(data[step : step + 1]).sum().backward()
    optimizer.step()
    with open("train.log", "a") as file:
        file.write("a line that is longer than all of the weights\\n")
    if step == 12:
        with open("new.pkl", "wb") as file:
            pickle.dump((step + 1, model.state_dict()), file)
        os.replace("new.pkl", "last.pkl")
    if step == 15:
        with open("last.pkl", "wb") as file:
            pickle.dump((step + 1, model.state_dict()), file)
"""


def test_a_log_is_no_checkpoint_and_a_file_may_be_written_last(capsys: pytest.CaptureFixture[str]) -> None:
    """The save that is torn is that of the model, also where nothing else is written before the next step."""
    judged = promise(certify(capsys, LOGS, "saves"), "saves survive a kill")
    assert judged["cause"] == "cannot load", judged
    assert "after step 16, in the middle of writing last.pkl" in judged["message"]


COMPILED = """
import os
import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(48, 4)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model.compile(backend="eager")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict({k: v for k, v in state["model"].items() if "running" not in k}, strict=False)
    first = state["step"]
for step in range(first, 12):
    optimizer.zero_grad()
    model(data[4 * step : 4 * step + 4]).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step + 1}, "new.pt")
    os.replace("new.pt", "last.pt")
"""


@pytest.mark.exhaustive
def test_a_model_that_is_compiled_in_place_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """Its inputs and buffers."""
    judged = promise(certify(capsys, COMPILED, "resume"), "resume is exact")
    assert judged["causes"] == ["buffers"], judged


SAVES_AT_THE_END = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
"""


def test_a_script_that_saves_at_its_end_alone_loses_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins anew and ends the same, and that is no resume."""
    monkeypatch.chdir(tmp_path)
    told = promise(certify(capsys, SAVES_AT_THE_END, "resume is exact"), "resume is exact")
    assert (told["verdict"], told["cause"]) == ("failed", "does not resume")
    assert "nothing is saved before the last step" in told["message"]
