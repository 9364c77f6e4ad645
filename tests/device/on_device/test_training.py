"""Training on a device gives the bits of the loop by hand on that device."""

from __future__ import annotations

import pytest
import torch

from device.on_device.compositions import Blocks
from device.on_device.tasks import DEVICE, MODELS, OPTIMIZERS, Task, adamw, assert_same, loader, train_by_hand, weights
from emulation.record import record
from zae.addons import ActivationOffloadAddon, AMPAddon, GradientAccumulationAddon, GradientCheckpointingAddon


def train(kind, make_optimizer, *addons, **options):
    return train_model(MODELS[kind], kind, make_optimizer, *addons, **options)


def train_model(make_model, kind, make_optimizer, *addons, **options):
    torch.manual_seed(0)
    trainer = Task.add_on(*addons)(make_model(), DEVICE, optimizer=make_optimizer, gradient_clip=1.0, **options)
    trainer.run(2, loader(kind))
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {DEVICE}
    assert not record.violations
    return weights(trainer.model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_is_the_loop_by_hand(kind, optimizer):
    assert_same(train(kind, OPTIMIZERS[optimizer]), train_by_hand(kind, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_bf16_is_autocast_by_hand(optimizer):
    ours = train("attention", OPTIMIZERS[optimizer], AMPAddon, precision="bf16")
    assert_same(ours, train_by_hand("attention", OPTIMIZERS[optimizer], autocast=torch.bfloat16))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fp16_is_a_gradient_scaler_by_hand(optimizer):
    ours = train("dense", OPTIMIZERS[optimizer], AMPAddon, precision="fp16")
    assert_same(ours, train_by_hand("dense", OPTIMIZERS[optimizer], autocast=torch.float16, scaled=True))


def test_accumulation_is_the_loop_by_hand():
    ours = train("dense", adamw, GradientAccumulationAddon, gradient_accumulation_steps=2)
    assert_same(ours, train_by_hand("dense", adamw, accumulation=2))


@pytest.mark.parametrize("with_offloading", [False, True])
def test_a_forward_that_is_computed_again_draws_the_same_dropout(with_offloading):
    expected = train_model(Blocks, "dense", adamw)
    if with_offloading:
        addons, options = (ActivationOffloadAddon, GradientCheckpointingAddon), {"offload_min_bytes": 1}
    else:
        addons, options = (GradientCheckpointingAddon,), {}
    assert_same(train_model(Blocks, "dense", adamw, *addons, **options), expected)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_step_of_the_default_optimizer_counts_as_a_change(rate):
    """With the rate 0 too: an epoch that has changed no weight is told by this count."""
    parameter = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.SGD([parameter], lr=rate)
    parameter.grad = torch.ones_like(parameter)
    before = parameter._version
    optimizer.step()
    assert parameter._version > before
