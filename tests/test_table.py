"""Every add-on alone, in every pair and in orders of three: it composes, commutes, pickles, trains and resumes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import zae.addons
from kit import hand
from kit.table import TABLE, Entry, Task, build, compatible, composed, core_of, fingerprint, parts
from zae.addons import (
    AccelerateAddon,
    DeepSpeedAddon,
    FSDPAddon,
    PipelineAddon,
    TensorParallelAddon,
)
from zae.checkpoint.encoding import decode, encode
from zae.compose.order import arrange

_ENGINES = (
    AccelerateAddon, DeepSpeedAddon, FSDPAddon, PipelineAddon, TensorParallelAddon,
)  # fmt: skip
IDS = [entry.id for entry in TABLE]
PAIRS = [pair for pair in itertools.combinations(TABLE, 2) if compatible(*pair)]
# Those that act on the step; what only watches is in every pair.
ACTING = [entry for entry in TABLE if entry.add_on.layer != "observe"]
# Add-ons exclude each other in pairs: to make each class here would take a second in every process that collects.
TRIPLES = [three for three in itertools.combinations(ACTING, 3) if {*itertools.combinations(three, 2)} <= {*PAIRS}]
# On one device the engines do the same: in threes MultiGPUAddon stands for them by default.
TRAINED = [
    pytest.param(three, marks=[pytest.mark.exhaustive] * any(each.add_on in _ENGINES for each in three))
    for three in TRIPLES
]
ACTING_PAIRS = [pair for pair in PAIRS if {*pair} <= {*ACTING}]
EPOCHS = 3


def together(entries: tuple[Any, ...]) -> str:
    return " + ".join(entry.id for entry in entries)


def train(trainer: Any, epochs: int = EPOCHS, valid: bool = True) -> Any:
    """Train from a fixed seed; watched, unless said otherwise."""
    torch.manual_seed(7)
    trainer.run(epochs, hand.loader(), hand.loader(seed=9, shuffle=False) if valid else None)
    return trainer


def capture_at(steps: Any, trainer: Any) -> dict[int, Any]:
    """Fill a dict with the state after each of these steps, or after each one, while the trainer runs."""
    states: dict[int, Any] = {}
    checkpoint = trainer.checkpoint

    def look() -> None:
        checkpoint()
        step = trainer.progress_checker.step
        if step not in states and (steps is None or step in steps):
            states[step] = through_disk(trainer.state_dict())

    trainer.checkpoint = look
    return states


def own_states(entries: tuple[Any, ...], trainer: Any) -> dict[str, str]:
    """Return a hash of the state of each add-on that has one."""
    state = trainer.state_dict()
    return {entry.id: fingerprint(entry.comparable(state[entry.key])) for entry in entries if entry.stateful}


class Straight:
    """The run of a composition with settings that bite, which several tests look at."""

    def __init__(self, entries: tuple[Any, ...], folder: Path) -> None:
        trainer = build(entries, "biting", folder, log_every=2)
        # In the middle of the second epoch: a window of four leaves two steps in each.
        self.middle = 3 if any("accumulate" in entry.by_hand for entry in entries) else 8
        states = capture_at({self.middle}, trainer)
        train(trainer)
        self.state = states.get(self.middle)
        self.weights = hand.digest(trainer.model)
        self.losses = hand.losses(trainer), hand.losses(trainer, "valid")
        self.average = trainer.average if hasattr(trainer, "average") else None
        self.skipped = trainer.progress_checker.skipped_steps
        self.scaler = trainer.precision_part.state_dict() or None
        self.core = {part: fingerprint(value) for part, value in core_of(trainer).items()}
        self.own = own_states(entries, trainer)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs a composition once."""
    return functools.cache(lambda *entries: Straight(entries, tmp_path_factory.mktemp("straight")))


@pytest.fixture(autouse=True)
def _no_sink_fails(caplog: Any) -> Any:
    """A logger that has failed does nothing any more, and its rows would show nothing."""
    yield
    assert [text for record in caplog.get_records("call") if "failed" in (text := record.getMessage())] == []


@pytest.fixture(scope="module")
def plain() -> Any:
    """Two epochs without any add-on, and without watching."""
    return train(build([], "neutral", None), 2, valid=False)  # type: ignore[arg-type]


def by_hand(*entries: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The loop that does what these add-ons do."""
    return loop_with(frozenset(item for entry in entries for item in entry.by_hand.items()))


@functools.cache
def loop_with(chosen: frozenset[tuple[str, Any]]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Run the loop with these options."""
    model, optimizer = parts()
    options: dict[str, Any] = dict(chosen)
    torch.manual_seed(7)
    out = hand.train(
        model, optimizer, hand.loader(), EPOCHS, clip=0.5, valid=hand.loader(seed=9, shuffle=False), **options
    )
    return model, out


# --- the table itself


def test_every_add_on_is_in_the_table() -> None:
    named = [getattr(zae.addons, name) for name in zae.addons.__all__]
    bases = {add_on for add_on in named if any(other is not add_on and issubclass(other, add_on) for other in named)}
    assert {entry.add_on for entry in TABLE} == set(named) - bases


@pytest.mark.parametrize("entry", TABLE, ids=IDS)
def test_packages_are_there(entry: Any) -> None:
    assert [package for package in entry.packages if importlib.util.find_spec(package) is None] == []


@pytest.fixture(scope="module")
def untouched() -> Any:
    """The attributes of a trainer without add-ons before and after training."""
    other = build([], "neutral", None)  # type: ignore[arg-type]
    return set(vars(other)), set(vars(train(other)))


@pytest.mark.parametrize("entry", TABLE, ids=IDS)
def test_what_training_changes_in_an_add_on_is_in_its_state(entry: Any, tmp_path: Any, untouched: Any) -> None:
    """An attribute that a run changes is in the state, or the table says why no resume needs it."""
    trainer, (plain_before, plain_after) = build([entry], "biting", tmp_path), untouched
    before = {name: snapshot(value) for name, value in vars(trainer).items() if name not in plain_before}
    train(trainer)
    changed = {name for name, value in before.items() if snapshot(vars(trainer)[name]) != value}
    # The generators are made by AddOnBase, which has no __init__.
    unknown = set(vars(trainer)) - plain_after - set(before) - {"_add_on_generators"}
    assert unknown == set(), "an attribute that __init__ does not make"
    kept = changed - set(entry.transient)
    own = trainer.state_dict().get(entry.key)
    assert entry.stateful == (own is not None)
    assert not kept or own is not None, f"{entry.id} changes {kept}, and saves nothing"


def snapshot(value: Any) -> str:
    """What a value is, for a comparison."""
    try:
        return fingerprint(value)
    except ValueError:  # no plain value: what it is made of
        return repr(value)


# --- composing


@pytest.mark.sample(covering=5)
@pytest.mark.parametrize("pair", PAIRS, ids=together)
def test_pairs_commute(pair: Any) -> None:
    """One class, whatever the order and however it is spelt."""
    first, second = (entry.add_on for entry in pair)
    made = Task.add_on(first, second)
    assert made is Task.add_on(second, first) is Task.add_on(first).add_on(second) is Task.add_on(second).add_on(first)
    assert made is Task.add_on(first, second, first)
    by_class = type("ByClass", (*arrange([first, second]), Task), {"__module__": __name__})
    assert [c for c in by_class.__mro__ if c in (first, second)] == [c for c in made.__mro__ if c in (first, second)]


@pytest.mark.sample(covering=4)
@pytest.mark.parametrize("triple", TRIPLES, ids=together)
def test_triples_commute(triple: Any) -> None:
    """In all six orders."""
    classes = {Task.add_on(*(entry.add_on for entry in order)) for order in itertools.permutations(triple)}
    assert len(classes) == 1


@pytest.mark.sample(covering=2)
@pytest.mark.parametrize("pair", PAIRS, ids=together)
def test_classes_pickle(pair: Any) -> None:
    """The class comes back as the same class."""
    assert pickle.loads(pickle.dumps(composed(*pair))) is composed(*pair)


@pytest.mark.sample(count=13)
@pytest.mark.parametrize("entries", [(entry,) for entry in TABLE] + ACTING_PAIRS, ids=together)
def test_trainers_are_copied(entries: Any, tmp_path: Any) -> None:
    """A trainer that was pickled or copied continues where it was."""
    trainer = build(entries, "biting", tmp_path)
    loaders = hand.loader(), hand.loader(seed=9, shuffle=False)
    torch.manual_seed(7)
    trainer.run(EPOCHS, *loaders, max_steps=4)  # It ends within an epoch, which each of them continues.
    twins = [pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)]
    for number, twin in enumerate(twins):
        twin.log_dir = tmp_path / f"twin-{number}"  # In one folder, event files wait for a second of their own.
    for each in [trainer, *twins]:
        each.run(EPOCHS, *loaders, max_steps=3)
    assert len({hand.digest(each.model) for each in [trainer, *twins]}) == 1
    assert trainer.progress_checker.step == 7


# --- training


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("entries", [(entry,) for entry in TABLE] + PAIRS, ids=together)
def test_neutral_setting_is_the_plain_run(entries: Any, tmp_path: Any, plain: Any) -> None:
    """Bitwise, with a validation that the plain run does not have; weights, optimizer and random streams."""
    trainer = train(build(entries, "neutral", tmp_path), 2)
    found, expected = core_of(trainer), core_of(plain)
    for part in ("model", "optimizer", "scheduler", "progress", "random"):
        assert fingerprint(found[part]) == fingerprint(expected[part]), part
    assert trainer.train_history == plain.train_history


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("entries", [(entry,) for entry in TABLE] + PAIRS + TRAINED, ids=together)
def test_biting_setting_is_the_hand_loop(entries: Any, straight: Any) -> None:
    """Bitwise the weights, the epoch means and the validation's losses."""
    run = straight(*entries)
    model, out = by_hand(*entries)
    assert run.weights == hand.digest(model)
    assert run.losses == (out["means"], out["scores"])
    if any("decay" in entry.by_hand for entry in entries):
        assert all(torch.equal(run.average[name], value) for name, value in out["average"].items())
    if out["scaler"] is not None:
        assert run.skipped > 0
        assert run.scaler == out["scaler"].state_dict()
    bites = {key for entry in entries for key in entry.by_hand} & {"accumulate", "precision", "patience"}
    assert not bites or hand.digest(model) != hand.digest(by_hand()[0]), "the setting changes nothing"


TOGETHER = {entry.add_on for entry in ACTING} - {*_ENGINES}
"""What stands together: of the engines one."""


def test_all_together_is_the_hand_loop(tmp_path: Any) -> None:
    """As many as can stand together."""
    for kept in ("bf16", "fp16", "weights"):
        entries: list[Entry] = []
        for entry in (each for each in ACTING if each.variant in ("", kept)):
            entries += [entry] * compatible(*entries, entry)
        assert {add_on.__name__ for add_on in TOGETHER} <= {entry.add_on.__name__ for entry in entries}
        trainer = train(build(entries, "biting", tmp_path / kept))
        model, out = by_hand(*entries)
        assert hand.digest(trainer.model) == hand.digest(model)
        assert hand.losses(trainer, "valid") == out["scores"]


# --- resuming


def through_disk(state: Any) -> Any:
    """What a checkpoint would give back: nothing of the trainer that it came from."""
    structure, tensors = encode(state)
    return decode(json.loads(json.dumps(structure)), {name: tensor.clone() for name, tensor in tensors.items()})


def resume(entries: Any, state: Any, folder: Path, epochs: int, **options: Any) -> Any:
    """Load a state into a fresh trainer with other random streams, and train to the end."""
    fresh = build(entries, "biting", folder, log_every=2)
    torch.manual_seed(1)
    fresh.load_state_dict(state)
    fresh.progress_checker.run_calls.index = 0  # It is the first call of a script that was started again.
    fresh.run(epochs, hand.loader(), hand.loader(seed=9, shuffle=False), **options)
    return fresh


@pytest.mark.sample(count=16)
@pytest.mark.parametrize("apart", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("entry", TABLE, ids=IDS)
def test_state_round_trips_at_every_step(entry: Any, apart: int, tmp_path: Any) -> None:
    """Stopped after any step, in the middle of an epoch or at its end; by default some."""
    whole = build([entry], "biting", tmp_path / "whole", log_every=2)
    states = capture_at(None, whole)
    torch.manual_seed(7)
    whole.run(2, hand.loader(), hand.loader(seed=9, shuffle=False), valid_every=4)
    end = {part: fingerprint(value) for part, value in core_of(whole).items()}
    assert len(states) >= 4
    for step, state in list(states.items())[1::apart]:
        fresh = resume([entry], state, tmp_path / f"{step}", 2, valid_every=4)
        found = {part: fingerprint(value) for part, value in core_of(fresh).items()}
        assert found == end, f"a stop after step {step}"
        assert own_states((entry,), fresh) == own_states((entry,), whole), f"a stop after step {step}"


@pytest.mark.sample(count=12)
@pytest.mark.parametrize("pair", PAIRS, ids=together)
def test_state_of_pairs_round_trips(pair: Any, tmp_path: Any, straight: Any) -> None:
    """In the middle of an epoch."""
    whole = straight(*pair)
    fresh = resume(pair, whole.state, tmp_path, EPOCHS)
    assert {part: fingerprint(value) for part, value in core_of(fresh).items()} == whole.core
    assert own_states(pair, fresh) == whole.own
