"""What a kernel does wrong is raised by a later call: the note does not blame the step that has noticed it."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task, adamw, loader

ERRORS = {
    "of_torch": (torch.AcceleratorError, "CUDA error: device-side assert triggered"),
    "of_a_library": (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    "of_convolutions": (RuntimeError, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}
OF_THE_HOST = {
    "shapes": (RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
    "memory": (torch.OutOfMemoryError, "CUDA out of memory"),
}
"""They are found before anything is launched."""


class Failing(nn.Linear):
    """A layer whose third call raises an error, whatever has caused it."""

    def __init__(self, error):
        super().__init__(8, 1)
        self.error = error
        self.calls = 0

    def forward(self, values):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return super().forward(values)


def said_of(kind, text):
    """Train until an error is raised, and return what a user reads of it."""
    trainer = Task(Failing(kind(text)), DEVICE, optimizer=adamw, log_bar=False)
    with pytest.raises(kind) as raised:
        trainer.run(1, loader())
    return "".join(traceback.format_exception_only(raised.value))


def assert_says_where(text):
    assert "zae: in epoch 1, step 3 (batch 3)" in text
    assert "the error is of Failing" in text


@pytest.fixture(params=[None, "1"], ids=["", "blocking"])
def is_blocking(request, monkeypatch):
    """Whether a call waits for its kernels, so that it raises their errors; the variable is CUDA's."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if request.param:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", request.param)
    return bool(request.param) and DEVICE == "cuda"


@pytest.mark.parametrize("name", ERRORS)
def test_a_late_error_is_not_of_the_step_that_raises_it(name, is_blocking):
    text = said_of(*ERRORS[name])
    if is_blocking:
        assert_says_where(text)
        return
    assert "zae: noticed in epoch 1, step 3 (batch 3)" in text
    assert "or an earlier step, may be its cause" in text
    assert ("CUDA_LAUNCH_BLOCKING=1" in text) == (DEVICE == "cuda")
    assert "the error is of" not in text


@pytest.mark.parametrize("name", OF_THE_HOST)
def test_an_error_of_the_host_is_of_its_step(name, is_blocking):
    assert_says_where(said_of(*OF_THE_HOST[name]))
