"""With a model in parts, no device ever holds more than its part and one whole tensor; the parent holds nothing."""

from __future__ import annotations

import atexit
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task, weights
from emulation import core
from zae.addons import FSDPAddon, StateManagerAddon

BOTH = [f"{DEVICE}:0", f"{DEVICE}:1"]
WIDTH, LAYERS = 128, 16
LARGEST = WIDTH * WIDTH * 4
BATCHES = [torch.ones(4, WIDTH)] * 6


class Deep(nn.Module):
    """Sixteen layers, of which one is a sixteenth of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, values):
        for layer in self.layers:
            values = torch.relu(layer(values))
        return values


class Measuring(Task):
    """Notes what a device holds after a step, and the peaks of a save, and of the end of the run."""

    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        self.note("held", core().allocated(self.device.index))

    def on_save(self, path):
        super().on_save(path)
        self.note("save", core().peak(self.device.index))

    def on_run_end(self):
        super().on_run_end()
        core().reset_peak(self.device.index)
        atexit.register(lambda: self.note("end", core().peak(self.device.index)))

    def note(self, what, number):
        core().reset_peak(self.device.index)
        with open(Path(self.save_path).parent / f"rank-{self.rank}", "a") as file:
            print(json.dumps([what, number]), file=file)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def notes(folder, rank):
    """Return the latest number of each note of a rank, and remove them."""
    path = folder / f"rank-{rank}"
    found = dict(map(json.loads, path.read_text().splitlines()))
    path.unlink()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [1, 2])
def test_no_device_holds_more_than_its_part_and_a_tensor(runs, tmp_path):
    torch.manual_seed(0)
    options = {"save_path": tmp_path / "run", "save_format": "safetensors"}
    trainer = Measuring.add_on(FSDPAddon, StateManagerAddon)(Deep(), BOTH, optimizer=adamw, **options)
    in_parent = core().allocated(0)
    core().reset_peak(0)
    held = []
    for _ in range(runs):  # The second run begins with the whole state of the first.
        trainer.run(1, BATCHES)
        for rank in range(2):
            found = notes(tmp_path, rank)
            held.append(found["held"])
            assert max(found["save"], found["end"]) <= found["held"] + 2 * LARGEST
    assert max(held) - min(held) <= LARGEST
    assert core().peak(0) == in_parent
    assert {value.device.type for value in trainer.unwrap().parameters()} == {"cpu"}
    assert all(value.isfinite().all() for value in weights(trainer.unwrap()).values())


class Short(Measuring):
    """Leaves no room on the device as a state is read, so that there is none for a whole tensor."""

    def model_state(self):
        core().set_limit(core().allocated(self.device.index) + LARGEST // 4)
        return super().model_state()


@pytest.mark.exhaustive
def test_short_memory_in_a_save_is_named(tmp_path):
    """It is no rank that did not take part: what helps is more memory, or a checkpoint in shards."""
    options = {"save_path": tmp_path / "run", "save_format": "safetensors"}
    trainer = Short.add_on(FSDPAddon, StateManagerAddon)(Deep(), BOTH, optimizer=adamw, **options)
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory.*\[rank \d of 2\]") as raised:
        trainer.run(1, BATCHES[:2])
    assert "save_format='sharded'" in "\n".join(raised.value.__notes__)
