"""Kinds of scripts that resume, or not: the verdict and the cause are right at each instant that is tried."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cases import TORCHRUN
from resumecheck import Options, Refused, Result, check, guard
from resumecheck.judge import NOT_JUDGED
from resumecheck.report import as_text

LOOP = """
import os
import torch

def train(save=None, load=None, every=5, steps=30):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = torch.randn(240, 16)
    first = 0
    if load is not None:
        first = load(model, optimizer)
    elif os.path.exists("last.pt"):
        first = apply(torch.load("last.pt"), model, optimizer)
    for step in range(first, steps):
        optimizer.zero_grad()
        model(data[8 * step : 8 * step + 8]).square().mean().backward()
        optimizer.step()
        if (step + 1) % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            state["random"] = torch.get_rng_state()
            if save is not None:
                save(state)
            else:
                torch.save(state, "new.pt")
                os.replace("new.pt", "last.pt")

def apply(state, model, optimizer):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["step"]
"""
"""A right loop, which takes another way to save or to load."""

SLOW_LOOP = LOOP.replace("optimizer.step()", "optimizer.step(); time.sleep(0.03)")

REMOVES_THEN_RENAMES = """
def save(state):
    torch.save(state, "new.pt")
    if os.path.exists("last.pt"):
        os.remove("last.pt")
    os.rename("new.pt", "last.pt")

train(save)
"""
LOADS_THE_OLDEST = """
import glob

def load(model, optimizer):
    files = sorted(glob.glob("ckpt-*.pt"), reverse=True)  # "ckpt-5.pt" is the first.
    return apply(torch.load(files[0]), model, optimizer) if files else 0

train(lambda state: torch.save(state, f"ckpt-{state['step']}.pt"), load)
"""
SAVES_IN_A_THREAD = """
import copy
import threading
import time

def write(state):
    time.sleep(0.05)
    torch.save(state, "new.pt")
    os.replace("new.pt", "last.pt")

def save(state):
    thread = threading.Thread(target=write, args=(copy.deepcopy(state),))
    threads.append(thread)
    thread.start()

threads = []
train(save, every=10)
for thread in threads:
    thread.join()
"""
TWO_FILES = """
def save(state):
    for name in ("model", "optimizer"):
        torch.save(state[name], "new.pt")
        os.replace("new.pt", f"{name}.pt")
    torch.save({key: state[key] for key in ("random", "step")}, "new.pt")
    os.replace("new.pt", "rest.pt")

def load(model, optimizer):
    if not os.path.exists("rest.pt"):
        return 0
    parts = {name: torch.load(f"{name}.pt") for name in ("model", "optimizer")}
    return apply({**parts, **torch.load("rest.pt")}, model, optimizer)

train(save, load)
"""
SAFETENSORS = """
from safetensors.torch import load_file, save_file

def save(state):
    tensors = {f"model.{name}": value for name, value in state["model"].items()} | {"random": state["random"]}
    for index, values in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    tensors["step"] = torch.tensor(state["step"])
    save_file(tensors, filename="new.tmp")
    os.replace("new.tmp", "last.safetensors")

def load(model, optimizer):
    if not os.path.exists("last.safetensors"):
        return 0
    tensors = load_file("last.safetensors")
    states = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            states.setdefault(int(index), {})[key] = value
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["random"])
    return int(tensors["step"])

train(save, load, every=25, steps=40)
"""
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
ACCUMULATES = """
import os
import torch

torch.manual_seed(0)
data = torch.randn(100, 8, 10)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["batch"]
for batch in range(first, 100):
    model(data[batch]).square().mean().backward()
    if (batch + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
    if (batch + 1) % 10 == 5:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batch": batch + 1}
        torch.save(state, "new.pt")
        os.replace("new.pt", "last.pt")
"""
PUTS_BACK = """
    for parameter, gradient in zip(model.parameters(), state["gradients"]):
        parameter.grad = gradient
"""
SAVES_GRADIENTS = ACCUMULATES.replace(
    '"batch": batch + 1}', '"batch": batch + 1, "gradients": [each.grad for each in model.parameters()]}'
).replace('state["batch"]\n', 'state["batch"]' + PUTS_BACK)
NO_WEIGHT_CHANGES = """
import os
import torch

torch.manual_seed(0)
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.rand(40, 8, 20)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, 40):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(data[step]), torch.rand(8, 1)).backward()  # Of one class: always 0.
    optimizer.step()
    if step % 8 == 7:
        torch.save({"model": model.state_dict(), "step": step + 1}, "new.pt")
        os.replace("new.pt", "last.pt")
"""
AVERAGES = """
from torch.optim.optimizer import register_optimizer_step_post_hook

average = None

def load(model, optimizer):
    global average
    first = apply(torch.load("last.pt"), model, optimizer) if os.path.exists("last.pt") else 0
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def update(*_):
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.05)

    register_optimizer_step_post_hook(update)
    return first

train(load=load)
torch.save(average, "average.pt")
"""
OWN_UPDATES = """
import os
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.randn(30, 8, 4)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    first = state["step"] - 1  # One step is made again.
for step in range(first, 30):
    model.zero_grad()
    model(data[step]).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "step": step + 1}, "new.pt")
        os.replace("new.pt", "last.pt")
"""
SHARDS = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
data = torch.randn(12, 2, 8, 16)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
whole = [each for each in sorted(os.listdir(".")) if os.path.exists(f"{each}/.metadata")]
first = int(whole[-1].partition("-")[2]) if whole else 0
if whole:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({LOADED}, checkpoint_id=whole[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
for step in range(first, 12):
    optimizer.zero_grad()
    model(data[step, dist.get_rank()]).square().mean().backward()
    optimizer.step()
    if step % 4 == 3:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"step-{step + 1:02}")
dist.destroy_process_group()
"""
MANY_THREADS = (
    """
import os
import torch

torch.set_num_threads(2)
torch.manual_seed(0)
data = torch.randn(300, 1000)
data = (data - data.mean()) / data.std()  # Large enough for threads.
print(f"{(data @ data.t()).sum()}")
"""
    + LOOP
    + "train()"
)
A_THREAD = """
import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
ROWS_OF_A_TABLE = """
import os
import torch

torch.manual_seed(0)
table = torch.nn.Embedding(4096, 64)
optimizer = torch.optim.SGD(table.parameters(), 0.1)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    table.load_state_dict(state["table"])
    first = state["step"]
for step in range(first, 20):
    optimizer.zero_grad()
    table(torch.tensor([8 + step])).square().mean().backward()  # One row of many.
    optimizer.step()
    if step % 5 == 4:
        torch.save({"table": table.state_dict(), "step": step + 1}, "new.pt")
        os.replace("new.pt", "last.pt")
"""
REPLAYS = """
import os
import random
import torch

torch.manual_seed(0)
random.seed(0)
data = torch.randn(40, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
first, buffer = 0, [data[0]]
if os.path.exists("last.pt"):
    state = torch.load("last.pt", weights_only=False)
    model.load_state_dict(state["model"])
    random.setstate(state["random"])
    first = state["step"]
for step in range(first, 40):
    buffer.append(data[step])
    optimizer.zero_grad()
    model(torch.stack(random.choices(buffer, k=4))).square().mean().backward()
    optimizer.step()
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "random": random.getstate(), "step": step + 1}, "new.pt")
        os.replace("new.pt", "last.pt")
"""
SAVES_BY_THE_CLOCK = """
import time

saved = time.monotonic()

def save(state):
    global saved
    time.sleep(0.05)
    if time.monotonic() > saved + 0.4:
        torch.save(obj=state, f="new.pt")
        os.replace("new.pt", "last.pt")
        saved = time.monotonic()

train(save, every=1)
"""
SAVES_AT_OTHER_STEPS = """
train(every=2 if os.path.exists("last.pt") else 7)
"""
FILES_OF_TWO_MODELS = (
    GAN.replace('if os.path.exists("last.pt"):', 'if os.path.exists("rest.pt"):')
    .replace('state = torch.load("last.pt")', 'state = {name: torch.load(f"{name}.pt") for name in [*parts, "rest"]}')
    .replace('state["random"]', 'state["rest"]["random"]')
    .replace('state["step"]', 'state["rest"]["step"]')
)
FILES_OF_TWO_MODELS = (
    FILES_OF_TWO_MODELS[: FILES_OF_TWO_MODELS.index("    state = {name: part.state_dict()")]
    + """
    if step % 4 == 3:
        state = {name: part.state_dict() for name, part in parts.items()}
        state["rest"] = {"random": torch.get_rng_state(), "step": step + 1}
        for name, part in state.items():
            torch.save(part, "new")
            os.replace("new", f"{name}.pt")
"""
)
SCHEDULES_BY_EPOCHS = LOOP.replace(
    "    first = 0\n",
    "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))\n    first = 0\n",
).replace(
    "        if (step + 1) % every == 0:",
    "        if step % 10 == 9:\n            scheduler.step()\n        if (step + 1) % every == 0:",
)
PROBES = LOOP.replace("    first = 0\n", "    model(torch.zeros(1, 16))\n    first = 0\n")
HDF5 = """
import os
import h5py
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
probe = torch.nn.Sequential(*model)  # Of the same weights, and gone before the second step.
probe(torch.zeros(1, 4))
data = torch.randn(100, 4)
first = 0
if os.path.exists("last.h5"):
    with h5py.File("last.h5") as file:
        model.load_state_dict({name: torch.tensor(file[name][()]) for name in model.state_dict()})
        first = FIRST
for step in range(first, 24):
    model.zero_grad()
    model(data[4 * step : 4 * step + 4]).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.grad
    probe = None
    if step % 6 == 5:
        with h5py.File("new.h5", "w") as file:
            for name, each in model.state_dict().items():
                file[name] = each.numpy()
            file.attrs["step"] = step + 1
        os.replace("new.h5", "last.h5")
"""
TIME = LOOP.replace("8 * step + 8])", "8 * step + 8] * (time.time_ns() % 1000))").replace(
    "import os", "import os, time"
)

ONE_WEIGHT = (
    LOOP.replace("Linear(16, 16)", "Linear(16, 2048)")
    .replace("Linear(16, 1)", "Linear(2048, 1)")
    .replace("        first = apply(", "        first = apply_with_another_weight(")
    + """
def apply_with_another_weight(state, model, optimizer):
    state["model"]["0.weight"].view(-1)[1000] += 0.1
    return apply(state, model, optimizer)

train()
"""
)

EVERY_RUN = ("two faults",)
"""One check of a fault that shows after a save, and of one within a save: each start of a script takes seconds."""


def check_script(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Result:
    """Check a script in a folder of its own, which stays as it is."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    result = check(["python", "train.py"], Options(**options))  # type: ignore[arg-type]
    assert os.listdir(folder) == ["train.py"]
    return result


KINDS = {
    "two faults": (
        LOOP.replace('    torch.set_rng_state(state["random"])\n', "") + REMOVES_THEN_RENAMES,
        {"random state"},
        {"lost work"},
        "before the rename of last.pt",
    ),
    "removes, then renames": (LOOP + REMOVES_THEN_RENAMES, set(), {"lost work"}, "before the rename of last.pt"),
    "loads the oldest": (
        LOOP + LOADS_THE_OLDEST,
        {"lost work"},
        set(),
        "20 steps of work that was saved are lost",
    ),
    "saves in a thread": (SLOW_LOOP + SAVES_IN_A_THREAD, set(), set(), "the same"),
    "two files": (
        LOOP + TWO_FILES,
        set(),
        {"two saves"},
        "the weights are those after step 10, and all else is of the save after step 5",
    ),
    "safetensors": (LOOP + SAFETENSORS, set(), set(), "resumed after step 25"),
    "an average is not saved": (LOOP + AVERAGES, {"other state"}, set(), "the tensors of average.pt at the end differ"),
    "numpy's stream": (DRAWS, {"random state"}, set(), "the random state (numpy) is not resumed"),
    "overwrites a pickle": (LOGS, set(), {"cannot load"}, "in the middle of writing last.pkl"),
    "compiled in place": (COMPILED, {"buffers"}, set(), "BatchNorm"),
    "an accumulated step": (ACCUMULATES, {"samples"}, set(), "between the batches of an accumulated step"),
    "gradients of an accumulated step": (SAVES_GRADIENTS, set(), set(), "the same"),
    "does not look": (
        LOOP.replace('os.path.exists("last.pt")', "False") + "train(every=10)",
        {"does not resume"},
        {"lost work"},
        "a kill after a save: FAILED at 2 of 2 instants",
    ),
    "threads before it looks": (MANY_THREADS, set(), set(), "1 starts and 7 forks in"),
    "a thread before it looks": (A_THREAD + LOOP + "train()", set(), set(), " and 0 forks in"),
    "a replay buffer": (REPLAYS, {"samples"}, set(), "the batch is that of no step"),
    "saves by the clock": (LOOP + SAVES_BY_THE_CLOCK, set(), set(), "the same"),
    "saves at other steps": (LOOP + SAVES_AT_OTHER_STEPS, set(), set(), "last.pt has the weights after another step"),
    "a file for each model": (FILES_OF_TWO_MODELS, set(), {"two saves"}, "of weight, ..., are those after step 16"),
    "a scheduler of epochs": (
        SCHEDULES_BY_EPOCHS + "train(every=4, steps=40)",
        {"learning rate"},
        set(),
        "resumed after step 20, parted at step 31",
    ),
    "updates of its own": (
        OWN_UPDATES,
        {"repeated work"},
        set(),
        "31 steps are made in all",
    ),
    "one weight of many": (ONE_WEIGHT, {"weights"}, set(), "the weights differ"),
    "rows of a table": (ROWS_OF_A_TABLE, set(), set(), "resumed after step 15"),
    "HDF5": (HDF5.replace("FIRST", 'int(file.attrs["step"])'), set(), set(), "resumed after step 18"),
    "probes before it loads": (
        PROBES.replace('    optimizer.load_state_dict(state["optimizer"])\n', "") + "train()",
        {"optimizer state"},
        set(),
        "the state of the optimizer is that before the first step",
    ),
    "maker": (GAN.replace("FORGOTTEN", "maker"), {"weights"}, set(), "Adam, optimizer 2 of 2, of weight, ..."),
    "critic": (
        GAN.replace("FORGOTTEN", "critic"),
        {"weights"},
        set(),
        "Adam, optimizer 1 of 2, of 0.weight, ...",
    ),
    "of maker": (
        GAN.replace("FORGOTTEN", "of maker"),
        {"optimizer state"},
        set(),
        "Adam, optimizer 2 of 2",
    ),
}
"""Each script, the causes after saves, those that only a kill within a save shows, and words of the report."""


@pytest.mark.parametrize(
    "name", [name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS]
)
def test_the_verdict_of_a_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, after_saves, in_saves, words = KINDS[name]
    result = check_script(text, tmp_path / "run", monkeypatch)
    assert set(result.causes("step")) == after_saves, as_text(result)
    assert set(result.causes("save")) == in_saves, as_text(result)
    assert words in as_text(result)
    assert result.status == bool(after_saves or in_saves)


@pytest.mark.exhaustive
def test_weights_that_no_step_changes_are_a_result_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check_script(NO_WEIGHT_CHANGES, tmp_path / "run", monkeypatch)
    assert result.status == 2, as_text(result)
    assert {each.verdict for each in result.judgements} == {NOT_JUDGED}
    assert "40 of 40 steps change no weight" in as_text(result)


@pytest.mark.exhaustive
def test_a_script_that_is_not_repeatable_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_script(TIME + "train()\n", tmp_path / "run", monkeypatch)
    assert result.status == 2, as_text(result)
    assert "not repeatable: two runs without a kill differ from step 1 on" in as_text(result)


@pytest.mark.exhaustive
def test_a_script_that_saves_at_its_end_alone_loses_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_script(SAVES_AT_THE_END, tmp_path / "run", monkeypatch)
    assert (result.status, result.judgements[0].cause) == (1, "does not resume")
    assert "it saves only after the last step (train.py:" in as_text(result)


@pytest.mark.exhaustive
def test_a_save_by_another_program_is_not_seen_and_not_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the size of the model is there at the end: nobody says that nothing is saved."""
    text = SAVES_AT_THE_END.replace(
        'torch.save(model.state_dict(), "model.pt")', "os.system('head -c 5000 /dev/zero > model.bin')"
    )
    result = check_script("import os\n" + text, tmp_path / "run", monkeypatch)
    assert (result.status, result.judgements[0].cause) == (2, "not seen"), as_text(result)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cause", ["", "optimizer state"])
def test_shards_of_two_ranks(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank saves what it has of a model that FSDP divides."""
    loaded = "{'model': weights}" if cause else "{'model': weights, 'optimizer': states}"
    (tmp_path / "train.py").write_text(SHARDS.replace("{LOADED}", loaded))
    monkeypatch.chdir(tmp_path)
    result = check([*TORCHRUN, "train.py"], Options(horizon=4))
    assert result.ranks == 2
    assert result.causes("step") == ([cause] if cause else []), as_text(result)
    assert result.causes("save") == [], as_text(result)


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", ["Permission denied", "last.pt: Permission denied", "/proc/sys/x: Permission denied"])
def test_words_of_the_script_are_no_refusal(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_script(f"print({words!r})\n" + SAVES_AT_THE_END, tmp_path / "run", monkeypatch)
    assert result.judgements[0].cause == "does not resume"


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["{}", "../last.pt"])
def test_a_program_that_writes_outside_is_refused(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, and the script as well: what the program says is all there is."""
    target = target.format(tmp_path / "last.pt")
    text = SAVES_AT_THE_END + f"import os\nos.system('cp model.pt {target}')\n"
    if guard.has_landlock():
        with pytest.raises(Refused, match="a program of the script was not allowed"):
            check_script(text, tmp_path / "run", monkeypatch)
        assert os.listdir(tmp_path) == ["run"]


def test_a_save_outside_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is made; a remote folder at once."""
    text = LOOP + f"train(lambda state: torch.save(state, {str(tmp_path / 'last.pt')!r}))\n"
    with pytest.raises(Refused, match="outside of the working folder, and was ended before"):
        check_script(text, tmp_path / "run", monkeypatch)
    assert os.listdir(tmp_path) == ["run"]
    with pytest.raises(Refused, match="s3://bucket/run is a remote folder"):
        check(["python", "train.py", "--out", "s3://bucket/run"])
