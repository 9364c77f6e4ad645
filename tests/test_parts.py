"""The parts of a trainer, each made without one."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

from kit.lines import Task, make
from zae import ConfigError, LoaderError
from zae.addons.accumulation import AccumulationWindow
from zae.addons.amp import MixedPrecision
from zae.parts import Precision, StepWindow


def network():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def step(precision, model, optimizer, factor=1.0):
    """Make a step as a trainer does; return whether it took place."""
    with precision.forward_context():
        loss = model(torch.ones(4, 2)).square().mean() * factor
    precision.scale(loss).backward()
    precision.unscale([optimizer])
    stepped = precision.step(optimizer)
    precision.update()
    optimizer.zero_grad()
    return stepped


def test_the_default_precision_changes_nothing():
    model, optimizer = network()
    precision, loss = Precision(), torch.ones(())
    assert (precision.name, precision.is_scaled) == ("fp32", False)
    assert precision.scale(loss) is loss
    with precision.forward_context():
        assert model(torch.ones(4, 2)).dtype == torch.float32
    assert precision.state_dict() == {}
    assert precision.found_inf(optimizer) == []
    assert step(precision, model, optimizer)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_forward_in_mixed_precision_computes_in_its_type(name, dtype):
    model, optimizer = network()
    precision = MixedPrecision(name)
    precision.begin("cpu", [optimizer])
    with precision.forward_context():
        assert model(torch.ones(4, 2)).dtype == dtype
    assert model(torch.ones(4, 2)).dtype == torch.float32
    precision.end()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_only_float16_is_scaled(name):
    precision = MixedPrecision(name)
    precision.begin("cpu", [])
    loss = torch.ones(())
    assert precision.scale(loss) is loss
    assert not precision.is_scaled
    assert not precision.keep_scale_up()


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model, optimizer = network()
    precision = MixedPrecision("fp16", loss_scale=(64.0, 1.0))
    precision.begin("cpu", [optimizer])
    assert precision.is_scaled
    assert precision.scale({"a": torch.ones(())})["a"] == 64.0
    before = model.weight.detach().clone()
    assert not step(precision, model, optimizer, factor=float("inf"))
    assert torch.equal(model.weight, before)
    assert precision.scale(torch.ones(())) == 32.0
    assert step(precision, model, optimizer)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_an_overflow_of_another_rank_skips_the_step(others):
    """What ``reduce`` gives back is the sum over the ranks."""
    model, optimizer = network()
    precision = MixedPrecision("fp16")
    precision.begin("cpu", [optimizer])
    precision.scale(model(torch.ones(4, 2)).square().mean()).backward()
    precision.unscale([optimizer])
    precision.combine_found_inf([optimizer], lambda flag: flag + others)
    assert [float(flag) for flag in precision.found_inf(optimizer)] == [others]
    assert precision.step(optimizer) == (not others)


def test_the_scale_continues_in_another_run_and_in_a_copy():
    model, optimizer = network()
    precision = MixedPrecision("fp16", loss_scale=(64.0, 48.0))
    precision.begin("cpu", [optimizer])
    step(precision, model, optimizer, factor=float("inf"))
    assert precision.keep_scale_up()
    assert not precision.keep_scale_up()
    precision.end()
    assert not precision.is_scaled
    for each in (precision, copy.deepcopy(precision), pickle.loads(pickle.dumps(precision))):
        each.begin("cpu", [optimizer])
        assert each.scale(torch.ones(())) == 48.0
        each.end()
    other = MixedPrecision("fp16")
    other.load_state_dict(precision.state_dict())
    other.begin("cpu", [optimizer])
    assert other.scale(torch.ones(())) == 48.0


def test_the_default_window_is_one_batch():
    window = StepWindow()
    assert (window.batches, window.samples, window.batches_of(8, 2)) == (1, None, 1)


def test_a_window_of_samples_follows_from_the_loader_and_the_ranks():
    assert AccumulationWindow(4).batches_of(None, 3) == 4
    window = AccumulationWindow(samples=24)
    assert [window.batches_of(size, ranks) for size, ranks in ((8, 1), (4, 2), (None, 2))] == [3, 3, None]
    with pytest.raises(ConfigError, match="global_batch_size=24 is not a multiple of 7"):
        window.batches_of(7, 1)


@pytest.mark.parametrize("left", [5, None])
def test_windows_take_the_batches_in_their_order(left):
    windows = AccumulationWindow(2).group(iter(range(5)), 2, left)
    assert [list(window) for window in windows] == [[0, 1], [2, 3], [4]]


def test_a_window_fetches_its_batches_one_by_one_where_their_number_is_known():
    taken = []
    batches = (taken.append(n) or n for n in itertools.count())
    window = next(AccumulationWindow(3).group(batches, 3, 6))
    assert taken == []
    assert len(window) == 3
    assert next(iter(window)) == 0
    assert taken == [0]


def test_a_window_is_held_where_its_gradients_are_computed_again():
    part = AccumulationWindow(2)
    window = next(part.group(iter(range(4)), 2, 4, holds=True))
    assert [list(window), list(window)] == [[0, 1], [0, 1]]
    window = next(part.group(iter(range(4)), 2, 4))
    assert list(window) == [0, 1]
    with pytest.raises(TypeError, match="yielded once"):
        list(window)


def test_a_loader_that_ends_within_a_window_is_refused():
    window = next(AccumulationWindow(3).group(iter(range(2)), 3, 3))
    with pytest.raises(LoaderError, match="ended after 2 of the 3 batches"):
        list(window)


def test_a_trainer_has_the_defaults_from_its_constructor_on():
    trainer = make(Task)
    assert type(trainer.precision_part) is Precision
    assert type(trainer.step_window) is StepWindow
