"""`torch.set_default_device` of the script changes no result, and zae's own small tensors stay where they belong."""

from __future__ import annotations

import pytest
import torch

from device.on_device.tasks import DEVICE, Task, adamw, assert_same, data, dense, weights
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon

COMPOSITIONS = {
    "plain": ((), {}),
    "saved": ((StateManagerAddon,), {"save_path": "run"}),
    "saved_asynchronously": ((StateManagerAddon,), {"save_path": "run", "save_async": True}),
    "fp16_ema_accumulation": (
        (AMPAddon, EMAAddon, GradientAccumulationAddon),
        {"precision": "fp16", "gradient_accumulation_steps": 2},
    ),
}


def train(folder, addons, options):
    if "save_path" in options:
        options = {**options, "save_path": folder}
    torch.manual_seed(0)
    with torch.device("cpu"):  # A module draws its weights from the stream of the device that it is made on.
        model = dense()
        batches = [data(samples=8)] * 6
    trainer = Task.add_on(*addons)(model, DEVICE, optimizer=adamw, seed=0, **options)
    batches = [tuple(each.to(DEVICE) for each in batch) for batch in batches]
    trainer.run(2, batches, batches)
    return weights(trainer.unwrap())


@pytest.fixture
def plain_default():
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("plain_default")
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_default_device_changes_nothing(name, tmp_path):
    expected = train(tmp_path / "expected", *COMPOSITIONS[name])
    torch.set_default_device(DEVICE)
    assert_same(train(tmp_path / "found", *COMPOSITIONS[name]), expected)
