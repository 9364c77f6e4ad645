"""What a resume costs: each byte of the checkpoint is read once, and is in memory once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults
from zae import Trainer
from zae.addons import StateManagerAddon
from zae.checkpoint.names import MODEL_FILES
from zae.checkpoint.weights import load_weights, save_weights


class Task(Trainer):
    """One large layer, trained with AdamW: its state is twice as large as the weights."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def make(folder: Path, **options: Any) -> Any:
    model = torch.nn.Linear(1024, 4096)
    options = {"save_path": folder, "log_bar": False, "resume": "auto", **options}
    return Task.add_on(StateManagerAddon)(model, "cpu", optimizer=torch.optim.AdamW(model.parameters()), **options)


def trained(folder: Path, n_epoch: int = 1, **options: Any) -> tuple[Path, int]:
    """Train, and return the checkpoint with its size."""
    trainer = make(folder, **options)
    trainer.run(n_epoch, [torch.ones(2, 1024)] * 2)
    return trainer.last_path, sum(each.stat().st_size for each in trainer.last_path.iterdir())


def characters_read() -> int:
    """Return what this process has read so far, as the kernel counts it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def read_by(act: Any, *args: Any) -> int:
    before = characters_read()
    act(*args)
    return characters_read() - before


def memory(field: str) -> int:
    """Return what the kernel says of this process: VmRSS is its memory, VmHWM the most that it has had."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("save_format", ["safetensors", "ckpt"])
def test_resume_reads_each_byte_once(save_format: str, tmp_path: Path) -> None:
    """A resume reads as many bytes as the checkpoint has, and so does load_state()."""
    _, size = trained(tmp_path, save_format=save_format)
    trainer = make(tmp_path, save_format=save_format)
    assert read_by(trainer.setup) < 1.01 * size
    assert trainer.progress_checker.step == 2
    trainer.teardown()
    assert size <= read_by(trainer.load_state) < 1.01 * size


def test_resume_from_the_older_one_reads_each_once(tmp_path: Path) -> None:
    """Where the newest is damaged at its end, it and the one before it are each read once."""
    newest, size = trained(tmp_path, 2)
    model = newest / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    trainer = make(tmp_path)
    assert read_by(trainer.setup) < 2.01 * size
    assert trainer.progress_checker.step == 2


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("start_with", [("model",), ("model", "optimizer")])
def test_start_from_reads_each_byte_once(start_with: tuple[str, ...], tmp_path: Path) -> None:
    """A new run reads what it starts from once, from its construction to its first step."""
    _, size = trained(tmp_path / "first")

    def start() -> None:
        make(tmp_path / "second", start_from=tmp_path / "first", start_with=start_with).setup()

    assert read_by(start) < 1.01 * size


def size_of_trained(folder: Path, save_format: str) -> int:
    """Train in its own process: memory that it frees there is not used again by the resume."""
    torch.set_num_threads(1)
    return trained(folder, save_format=save_format)[1]


def peak_of_resume(folder: Path, save_format: str) -> int:
    """Return the most memory that a resume takes beside what the trainer held before; runs in its own process."""
    torch.set_num_threads(1)
    trainer = make(folder, save_format=save_format)
    suffix = MODEL_FILES[save_format]
    load_weights(save_weights(folder / "small" / suffix, {"w": torch.ones(2)}))  # It imports what reads.
    Path("/proc/self/clear_refs").write_text("5")  # The most so far is the present memory.
    before = memory("VmRSS")
    trainer.setup()
    assert trainer.progress_checker.step == 2
    return memory("VmHWM") - before


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("save_format", ["safetensors", "ckpt"])
def test_resume_holds_each_byte_once(save_format: str, tmp_path: Path) -> None:
    """At its peak a resume takes 1.1 times the size of the checkpoint, the optimizer's state included."""
    size = faults.answer(size_of_trained, tmp_path, save_format)
    assert faults.answer(peak_of_resume, tmp_path, save_format) < 1.1 * size
