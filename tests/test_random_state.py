"""The random streams: seeded, captured, restored, and kept from others."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from zae import Trainer
from zae import random_state as rng
from zae.addons.ledger.step_record import random_state
from zae.errors import CheckpointMismatch, ConfigError


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """Put the streams back after each test, by the libraries' own means."""
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def load(data: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader of anything that can be indexed."""
    return DataLoader(data, **options)


def draw() -> tuple[Any, ...]:
    """Draw from every stream, by each of the ways that keep something between two draws."""
    return (
        random.random(),
        random.gauss(0.0, 1.0),
        random.getrandbits(40),
        float(np.random.rand()),
        float(np.random.randn()),
        int(np.random.randint(1000)),
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        torch.randperm(6).tolist(),
    )


def disturb() -> None:
    """Leave every stream in another state, with the second number of a normal pair waiting."""
    rng.seed_everything(987654321)
    random.gauss(0.0, 1.0)
    np.random.randn()
    torch.randn(1)


# --- seed_everything --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32 + 5, 2**64 - 1, np.int64(3)])
def test_seed_makes_every_stream_repeat(seed: Any) -> None:
    rng.seed_everything(seed)
    first = draw()
    disturb()
    rng.seed_everything(seed)
    assert draw() == first


def test_seed_is_what_the_libraries_make_of_it() -> None:
    rng.seed_everything(2**32 + 70005)
    found = (random.random(), np.random.rand(), torch.rand(1).item())
    assert found[0] == random.Random(2**32 + 70005).random()
    assert found[1] == np.random.RandomState(70005).rand()
    assert found[2] == torch.rand(1, generator=torch.Generator().manual_seed(2**32 + 70005)).item()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True, False])
def test_seed_that_cannot_be_meant(seed: Any) -> None:
    rng.seed_everything(0)
    before = rng.capture()
    with pytest.raises(ConfigError, match=r"seed=.*; it must be a whole number of at least 0 and below 2\*\*64"):
        rng.seed_everything(seed)
    assert same(rng.capture(), before)


# --- capture and restore ----------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal, type for type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through_disk(value: Any, tmp_path: Any) -> Any:
    """Return the state after its tensors went through torch.save and all the rest through JSON."""
    tensors: list[torch.Tensor] = []

    def strip(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return {"tensor": len(tensors) - 1}
        if isinstance(part, dict):
            return {key: strip(item) for key, item in part.items()}
        return [strip(item) for item in part] if type(part) is list else part

    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            return loaded[part["tensor"]] if "tensor" in part else {key: fill(item) for key, item in part.items()}
        return [fill(item) for item in part] if type(part) is list else part

    text = json.dumps(strip(value), allow_nan=False)  # fails on whatever is neither a tensor nor JSON
    torch.save(tensors, tmp_path / "tensors")
    loaded = torch.load(tmp_path / "tensors", weights_only=True)
    return fill(json.loads(text))


@pytest.mark.parametrize("drawn", [0, 1, 2, 300])
def test_restore_is_exact_from_any_ambient_state(drawn: int, tmp_path: Any) -> None:
    rng.seed_everything(11)
    for _ in range(drawn):
        random.gauss(0.0, 1.0)
        np.random.randn()
        torch.randn(1)
    state = rng.capture()
    expected = [draw() for _ in range(4)]
    disturb()
    rng.restore(state)
    assert [draw() for _ in range(4)] == expected
    disturb()
    stored = through_disk(state, tmp_path)
    assert same(stored, state)
    rng.restore(stored)
    assert same(rng.capture(), state)
    assert [draw() for _ in range(4)] == expected


def test_capture_draws_nothing_and_is_a_copy() -> None:
    rng.seed_everything(3)
    expected = draw()
    rng.seed_everything(3)
    state = rng.capture()
    kept = copy.deepcopy(state)
    assert draw() == expected
    assert same(state, kept)
    rng.restore(state)
    draw()
    assert same(state, kept)


def test_what_a_state_is_made_of() -> None:
    random.gauss(0.0, 1.0)
    np.random.randn()
    state = rng.capture()
    assert ("cuda" in state) == torch.cuda.is_initialized()
    assert state["torch"].dtype == torch.uint8
    assert state["torch"].dim() == 1
    assert list(state["numpy"]) == ["key", "pos", "has_gauss", "cached_gaussian"]
    assert state["numpy"]["key"].dtype == torch.int64
    assert state["numpy"]["key"].shape == (624,)
    version, words, gauss_next = state["python"]
    assert version == 3
    assert type(words) is list
    assert len(words) == 625
    assert type(gauss_next) is float
    assert int(state["numpy"]["key"].max()) > 2**31  # whole words of 32 bits, not wrapped to negative ones
    assert int(state["numpy"]["key"].min()) >= 0


Damage = Callable[[dict[str, Any]], Any]


def without(name: str) -> Damage:
    return lambda state: {key: part for key, part in state.items() if key != name}


def numpy_with(**changes: Any) -> Damage:
    return lambda state: {**state, "numpy": {**state["numpy"], **changes}}


def python_with(index: int, value: Any) -> Damage:
    return lambda state: {**state, "python": [value if i == index else v for i, v in enumerate(state["python"])]}


def other(**parts: Any) -> Damage:
    return lambda state: {**state, **parts}


WORDS = torch.zeros(624, dtype=torch.int64)

DAMAGES: list[tuple[Damage, str]] = [
    (lambda state: None, "as a whole is a NoneType"),
    (lambda state: {}, "'torch' is absent"),
    (without("torch"), "'torch' is absent"),
    (without("numpy"), "'numpy' is absent"),
    (without("python"), "'python' is absent"),
    (other(jax=1), "'jax' is not a random state"),
    (other(xpu=1), "'xpu' is not a random state"),
    (other(torch=[1, 2]), "'torch' is not a random state"),
    (other(torch=torch.zeros(5056)), "'torch' is not a random state"),
    (other(torch=torch.zeros(2, 5, dtype=torch.uint8)), "'torch' is not a random state"),
    (other(torch=torch.zeros(16, dtype=torch.uint8)), "'torch' is not a random state"),
    (other(torch=torch.zeros(5056, dtype=torch.uint8)), "'torch' is not a random state"),
    (other(numpy=[1]), "'numpy' is not a random state"),
    (lambda state: {**state, "numpy": without("pos")(state["numpy"])}, "'numpy' is not a random state.*'pos'"),
    (numpy_with(key=[1] * 624), "'numpy' is not a random state"),
    (numpy_with(key=WORDS[:600]), "'numpy' is not a random state"),
    (numpy_with(key=WORDS - 1), "'numpy' .* a number is outside of its range"),
    (numpy_with(key=WORDS + 2**32), "'numpy' .* a number is outside of its range"),
    (numpy_with(pos=625), "'numpy' .* a number is outside of its range .pos=625"),
    (numpy_with(pos=-1), "'numpy' .* a number is outside of its range .pos=-1"),
    (numpy_with(pos=1.5), "'numpy' .* a number is outside of its range .pos=1.5"),
    (numpy_with(has_gauss=2), "'numpy' .* a number is outside of its range .* has_gauss=2"),
    (numpy_with(cached_gaussian=None), "'numpy' is not a random state"),
    (numpy_with(cached_gaussian=float("nan")), "'numpy' .* a number is outside of its range"),
    (other(python=3), "'python' is not a random state"),
    (other(python=[3, [1]]), "'python' is not a random state"),
    (python_with(0, 9), "'python' is not a random state"),
    (python_with(1, [1] * 600), "'python' is not a random state"),
    (python_with(1, [1] * 624 + [999]), "'python' is not a random state"),
    (python_with(1, [-1] * 625), "'python' is not a random state"),
    (python_with(1, ["1"] * 625), "'python' is not a random state"),
    (python_with(2, "x"), "'python' is not a random state"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_state_is_refused_by_part_and_changes_nothing(damage: Damage, message: str) -> None:
    rng.seed_everything(1)
    damaged = damage(rng.capture())
    rng.seed_everything(2)
    before = rng.capture()
    with pytest.raises(CheckpointMismatch, match=f"the saved random state {message}"):
        rng.restore(damaged)
    assert same(rng.capture(), before)


def test_another_generator_behind_numpy_is_refused() -> None:
    state = rng.capture()
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        for call in (rng.capture, lambda: rng.restore(state), lambda: rng.isolated().__enter__()):
            with pytest.raises(ConfigError, match=r"numpy\.random draws from PCG64"):
                call()
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]


# --- isolated ---------------------------------------------------------------------------------------------------------


def test_isolated_leaves_every_stream_where_it_was() -> None:
    rng.seed_everything(5)
    own = torch.Generator().manual_seed(6)
    torch.rand(3, generator=own)
    expected = rng.capture()
    expected_own = own.get_state()
    with rng.isolated(own):
        draw()
        torch.rand(7, generator=own)
        with rng.isolated():
            disturb()
        own.manual_seed(1)
        disturb()
    assert same(rng.capture(), expected)
    assert torch.equal(own.get_state(), expected_own)


def test_isolated_goes_on_from_where_the_streams_are() -> None:
    rng.seed_everything(5)
    with rng.isolated():
        inside = draw()
    assert draw() == inside


def test_isolated_restores_after_an_exception() -> None:
    rng.seed_everything(5)
    own = torch.Generator().manual_seed(6)
    expected, expected_own = rng.capture(), own.get_state()

    def fail() -> None:
        with rng.isolated(own):
            draw()
            torch.rand(1, generator=own)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert same(rng.capture(), expected)
    assert torch.equal(own.get_state(), expected_own)


def test_isolated_keeps_a_validation_loader_from_the_training_order() -> None:
    def order(watch: bool) -> list[int]:
        rng.seed_everything(8)
        train, valid = load(range(10), shuffle=True), load(range(4), shuffle=True)
        seen = []
        for _ in range(3):
            seen += [int(x) for x in train]
            if watch:
                with rng.isolated():
                    list(valid)
        return seen

    assert order(watch=True) == order(watch=False)


def test_isolated_takes_generators_only() -> None:
    with pytest.raises(ConfigError, match=r"torch.Generator objects, found list; write isolated\(\*generators_of"):
        with rng.isolated([torch.Generator()]):  # type: ignore[arg-type]
            pass


# --- the streams of accelerators --------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, ...]:
    """Two devices of a kind that is neither CUDA nor MPS: true generators, where torch would keep those of an XPU."""
    generators = (torch.Generator().manual_seed(11), torch.Generator().manual_seed(12))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "default_generators": generators,
        "get_rng_state": lambda index: generators[index].get_state(),
        "set_rng_state": lambda state, index: generators[index].set_state(state),
    }.items():
        monkeypatch.setattr(torch.xpu, name, value)
    return generators


def test_the_streams_of_any_accelerator_are_captured_and_restored(accelerator: tuple[torch.Generator, ...]) -> None:
    state = rng.capture()
    expected = [torch.rand(3, generator=each) for each in accelerator]
    assert len(state["xpu"]) == len(rng.of_devices()["xpu"]) == 2
    with rng.isolated():
        for each in accelerator:
            each.manual_seed(99)
        torch.rand(5, generator=accelerator[1])
    rng.restore(state)
    assert all(map(torch.equal, expected, [torch.rand(3, generator=each) for each in accelerator]))
    before = rng.capture()
    with pytest.raises(CheckpointMismatch, match="'xpu' is not a random state"):
        rng.restore({**state, "xpu": [state["torch"], state["torch"][:16]]})
    assert same(rng.capture(), before)


def test_a_ledger_sees_what_is_drawn_on_any_accelerator(accelerator: tuple[torch.Generator, ...]) -> None:
    before = random_state()
    torch.rand(1, generator=accelerator[1])
    assert random_state() != before


def test_streams_that_begin_inside_are_taken_back_to_their_beginning(
    accelerator: tuple[torch.Generator, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(12))
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: False)
    assert "xpu" not in rng.capture()
    with rng.isolated():
        monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
        torch.rand(9, generator=accelerator[1])
    assert torch.equal(torch.rand(3, generator=accelerator[1]), expected)


def test_a_run_goes_on_on_a_machine_with_fewer_devices_and_says_what_that_changes(
    accelerator: tuple[torch.Generator, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = rng.capture()
    expected = torch.rand(3), torch.rand(3, generator=accelerator[0])
    disturb()
    untouched = rng.capture()["xpu"][1]
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    for _ in range(2):
        rng.restore(state)
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, generator=accelerator[0]), expected[1])
    assert torch.equal(accelerator[1].get_state(), untouched)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    rng.restore(state)
    assert torch.equal(torch.rand(3), expected[0])
    rng.restore(state)
    said = [record.getMessage().partition(":")[0] for record in caplog.records]  # Once, and only where none is left.
    assert said == ["the saved random state is of a device of kind xpu, and none is visible here"]


def test_the_stream_of_the_current_device_goes_to_the_current_one(
    accelerator: tuple[torch.Generator, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run may go on on another device than it began on."""
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    state = rng.capture()
    here, other = (torch.rand(3, generator=each) for each in (accelerator[1], accelerator[0]))
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    rng.restore(state)
    assert torch.equal(torch.rand(3, generator=accelerator[0]), here)
    assert torch.equal(torch.rand(3, generator=accelerator[1]), other)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    rng.restore(state)
    assert torch.equal(torch.rand(3, generator=accelerator[0]), here)
    assert not caplog.records


def test_noise_in_an_evaluation_on_an_accelerator_leaves_training_alone_and_a_resume_is_exact(
    accelerator: tuple[torch.Generator, ...],
) -> None:
    class Noisy(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            noise = torch.rand(2, generator=accelerator[0])
            return {"loss": (self.model.weight * (batch + noise)).square().mean()}

        test_step = train_step

    def trainer() -> Noisy:
        accelerator[0].manual_seed(11)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return Noisy(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False)

    batches = [torch.randn(3, 2) for _ in range(4)]
    straight = trainer()
    straight.run(2, batches)
    validated = trainer()
    validated.run(2, batches, batches, valid_every=1)
    assert torch.equal(validated.unwrap().weight, straight.unwrap().weight)
    stopped = trainer()
    stopped.run(2, batches, max_steps=5)
    state, resumed = stopped.state_dict(), trainer()
    resumed.load_state_dict(state)
    resumed.run(1, batches)  # What is left of the second epoch.
    assert torch.equal(resumed.unwrap().weight, straight.unwrap().weight)


# --- the generators of a loader ---------------------------------------------------------------------------------------


def test_generators_of_each_place_once() -> None:
    data = list(range(8))
    a, b, c = (torch.Generator().manual_seed(seed) for seed in (1, 2, 3))
    assert rng.generators_of(load(data)) == []
    assert rng.generators_of(load(data, shuffle=True)) == []
    # The loader hands its generator to the sampler it makes: one and the same.
    assert rng.generators_of(load(data, shuffle=True, generator=a)) == [a]
    assert rng.generators_of(load(data, sampler=RandomSampler(data, generator=b), generator=a)) == [a, b]
    batches = BatchSampler(RandomSampler(data, generator=b), 2, drop_last=False)
    assert rng.generators_of(load(data, batch_sampler=batches)) == [b]
    batches.generator = c  # type: ignore[attr-defined]
    assert rng.generators_of(load(data, batch_sampler=batches, generator=a)) == [a, b, c]
    assert rng.generators_of(load(data, batch_size=None, generator=a)) == [a]


@pytest.mark.parametrize("loader", [None, [1, 2], object(), (n for n in range(3)), "text"])
def test_generators_of_any_object(loader: Any) -> None:
    assert rng.generators_of(loader) == []
    assert rng.capture_generators(loader) == []
    rng.restore_generators(loader, [])


def test_generators_of_passes_over_other_things_called_generator() -> None:
    class Loader:
        generator = np.random.default_rng(0)
        sampler = None

    assert rng.generators_of(Loader()) == []


def make_loader(one: int, two: int) -> DataLoader[Any]:
    data = list(range(8))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(two))
    return load(data, sampler=sampler, generator=torch.Generator().manual_seed(one))


def epochs(loader: DataLoader[Any]) -> list[list[int]]:
    return [[int(x) for x in loader] for _ in range(3)]


def test_a_loader_goes_on_from_its_captured_generators() -> None:
    loader = make_loader(1, 2)
    epochs(loader)
    states = rng.capture_generators(loader)
    kept = copy.deepcopy(states)
    expected = epochs(loader)
    fresh = make_loader(3, 4)
    rng.restore_generators(fresh, states)
    assert epochs(fresh) == expected
    assert same(states, kept)


def test_another_number_of_generators_is_refused() -> None:
    states = rng.capture_generators(make_loader(1, 2))
    with pytest.raises(CheckpointMismatch, match="the states of 2 loader generators, this loader has 0; build"):
        rng.restore_generators([1, 2], states)
    with pytest.raises(CheckpointMismatch, match="the states of 1 loader generator, this loader has 2; build"):
        rng.restore_generators(make_loader(1, 2), states[:1])


def test_a_damaged_generator_state_is_refused_and_changes_nothing() -> None:
    loader = make_loader(1, 2)
    before = rng.capture_generators(loader)
    good = rng.capture_generators(make_loader(3, 4))[0]
    for bad in (torch.zeros(5056, dtype=torch.uint8), torch.zeros(3), None):
        with pytest.raises(CheckpointMismatch, match="the saved random state loader generator 1 is"):
            rng.restore_generators(loader, [good, bad])  # type: ignore[list-item]
    assert same(rng.capture_generators(loader), before)
