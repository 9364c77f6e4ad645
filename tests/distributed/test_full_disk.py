"""Ranks that run() starts get the trainer through the temporary folder: a full disk there is named."""

from __future__ import annotations

import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.faults import answer
from zae import DistributedError, Trainer
from zae.addons import MultiGPUAddon

LARGEST = 200_000  # Bytes of a file.


class Task(Trainer):
    grows = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    def on_run_end(self) -> None:
        super().on_run_end()
        if self.grows:
            self.history.log.append({"step": 0, "kept": torch.ones(LARGEST)})

    test_step = train_step


def _run(folder: Path, width: int, grows: bool) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))  # As root has no quota, and needs no mount.
    tempfile.tempdir = str(folder)
    trainer = Task.add_on(MultiGPUAddon)(nn.Linear(width, 8), ["cpu", "cpu"], optimizer=torch.optim.SGD, log_bar=False)
    trainer.grows = grows
    with pytest.raises(DistributedError) as raised:
        trainer.run(1, [torch.ones(2, width)] * 2)
    return str(raised.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "grows", "what"), [(10_000, False, "the trainer"), (8, True, "the result")])
def test_a_full_temporary_folder_is_named(tmp_path: Path, width: int, grows: bool, what: str) -> None:
    text = answer(_run, tmp_path, width, grows)
    assert text.startswith(f"{what} could not be written to {tmp_path}")
    assert "File too large" in text
    assert "set TMPDIR to a folder on a larger disk" in text
    assert not list(tmp_path.iterdir())
