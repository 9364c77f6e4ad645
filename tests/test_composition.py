"""Any set of add-ons, in any order, is one class, and trains bitwise like the loop of tests/kit/oracle.py."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import zae
from _generators import composition
from kit import matrix, oracle
from kit.matrix import PIECES, Task, add_ons, assert_is_by_hand, difference, run
from kit.oracle import Options
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon

# PyTorch warns, as it does for the hand-written loop, when a scheduler's epoch had nothing but skipped steps.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")

NAMES = sorted(add_ons())
SUBSETS = [few for size in range(len(NAMES) + 1) for few in itertools.combinations(NAMES, size)]
PARTS = 32  # Of all subsets.
CONFIGURATIONS = [
    # fp16 that overflows at first, a short last window, schedulers that wait for skipped steps, validation by steps.
    Options(precision="fp16", scale=2.0**19, accumulate=4, decay=0.8, patience=3, clip=0.5, scheduler="batch",
            validate=2, epochs=3),
    # Two networks with an optimizer each, targets that are counted, a plateau scheduler, validation by epochs.
    # Weights in bfloat16.
    Options(precision="weights", accumulate=3, decay=0.9, patience=2, clip=0.1, count_targets=True, networks=2,
            scheduler="plateau", validate="epoch", epochs=3),
    # Nothing is validated: training's own loss decides; the last epoch stays open.
    Options(precision="fp16", accumulate=2, decay=0.5, patience=2, count_targets=True, scheduler="epoch", epochs=4,
            optimizer="sgd", max_steps=8),
    Options(precision="fp16", scale=2.0**21, accumulate=5, decay=0.7, patience=1, delta=0.01, clip=0.05, networks=2,
            scheduler="batch", validate=1, epochs=2, optimizer="sgd"),
]  # fmt: skip


def only(options: Options, chosen: tuple[str, ...]) -> Options:
    """The options of the chosen add-ons alone."""
    return matrix.without(options, set(PIECES) - set(chosen))


def id_of(chosen: tuple[str, ...]) -> str:
    return "+".join(name.removesuffix("Addon") for name in chosen) or "none"


def in_parts(cases: list[Any], few: Any) -> list[Any]:
    """Cases that always run, and those that only ``-m exhaustive`` runs as well."""
    return [case if case in few else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


OFTEN = [few for few in SUBSETS if len(few) <= 1 or len(few) == len(NAMES)]
OFTEN += [few for few in SUBSETS if len(few) == len(NAMES) - 1][::4]
OFTEN += random.Random(0).sample([few for few in SUBSETS if few not in OFTEN], min(8, len(SUBSETS) - len(OFTEN)))


@pytest.mark.sample(count=20)
@pytest.mark.parametrize("chosen", OFTEN, ids=id_of)
def test_a_subset_is_the_hand_written_loop(chosen: tuple[str, ...]) -> None:
    """Observers among them change no bit."""
    assert_is_by_hand(chosen, only(CONFIGURATIONS[SUBSETS.index(chosen) % 4], chosen))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_every_subset_is_the_hand_written_loop(part: int) -> None:
    """All 2^n subsets of the add-ons that act, alone and with some that observe, in two configurations.

    A test for each would take long to collect.
    """
    acting = [name for name in NAMES if add_ons()[name].layer != "observe"]
    subsets = [few for size in range(len(acting) + 1) for few in itertools.combinations(acting, size)]
    draw = random.Random(part)
    for index, chosen in list(enumerate(subsets))[part::PARTS]:
        observers = draw.sample([name for name in NAMES if name not in acting], 3)
        assert_is_by_hand(chosen, only(CONFIGURATIONS[index % 4], chosen))
        both = tuple(sorted((*chosen, *observers)))
        assert_is_by_hand(both, only(CONFIGURATIONS[(index + 1) % 4], both))


@pytest.mark.sample(covering=2)
@pytest.mark.parametrize("pair", list(itertools.permutations(NAMES, 2)), ids=id_of)
def test_every_ordered_pair_is_one_class(pair: tuple[str, str]) -> None:
    """The order of naming does not matter, and a class written by hand is the same trainer or is refused."""
    first, second = (add_ons()[name] for name in pair)
    cls = Task.add_on(first, second)
    assert cls is Task.add_on(second, first)
    assert cls is Task.add_on(first).add_on(second)
    assert cls is Task.add_on(second).add_on(first).add_on(first)
    try:
        by_hand = type("ByHand", (first, second, Task), {"__module__": __name__})
    except zae.AddOnOrder as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert f"class ByHand({second.__name__}, {first.__name__}, Task)" in refused
        return
    options = only(CONFIGURATIONS[NAMES.index(pair[0]) % 2], pair)
    assert difference(run(by_hand, options, pair), options) is None


@pytest.mark.sample(count=5)
@pytest.mark.parametrize("seed", in_parts(list(range(200)), range(12)))
def test_random_permutations_with_random_options(seed: int) -> None:
    """Every add-on at once, or all but a few, named in a random order, with random options."""
    draw = random.Random(seed)
    chosen = draw.sample(NAMES, len(NAMES) - draw.choice([0, 0, 0, 1, 2]))
    assert Task.add_on(*(add_ons()[name] for name in chosen)) is Task.add_on(*(add_ons()[n] for n in sorted(chosen)))
    assert_is_by_hand(chosen, matrix.draw_options(draw, chosen))


def test_the_configurations_reach_what_they_are_for() -> None:
    """The proof proves nothing where no step is skipped, no window is short and nothing stops early."""
    outcomes = [oracle.train(options) for options in CONFIGURATIONS]
    assert outcomes[0].skipped
    assert outcomes[0].skipped < outcomes[0].step
    assert outcomes[3].skipped
    assert any(outcome.stopped for outcome in outcomes)
    assert not all(outcome.stopped for outcome in outcomes)
    assert outcomes[2].step == 8
    assert len(outcomes[2].train_rows) == 2
    windows = list(oracle.windows(oracle.make(CONFIGURATIONS[0])[3], 4))
    assert [len(window) for window in windows] == [4, 2]
    plain = dataclasses.replace(CONFIGURATIONS[0], clip=0.0)
    assert matrix.first_difference(oracle.train(plain).weights, outcomes[0].weights) is not None


# ------------------------------------------------------------------------------------ planted faults are named


def clip_before_unscale(patch: pytest.MonkeyPatch) -> None:
    unscale = AMPAddon.unscale

    def clip(self):
        super(AMPAddon, self).clip()
        unscale(self)

    def too_late(self):
        super(AMPAddon, self).unscale()

    patch.setattr(AMPAddon, "clip", clip, raising=False)
    patch.setattr(AMPAddon, "unscale", too_late)


def divide_by_the_configured_window(patch: pytest.MonkeyPatch) -> None:
    def scale_loss(self, loss, num_targets, count):
        return super(GradientAccumulationAddon, self).scale_loss(loss, num_targets, self.gradient_accumulation_steps)

    for name in ("scale_loss", "weigh"):  # A class that defines one of them is given the other, which would stay.
        patch.setattr(GradientAccumulationAddon, name, scale_loss, raising=False)


def average_after_skipped_steps(patch: pytest.MonkeyPatch) -> None:
    def optimizer_step(self):
        stepped = super(EMAAddon, self).optimizer_step()
        with torch.no_grad():
            for average, weight in self._averaged:
                average.mul_(self.decay).add_(weight, alpha=1 - self.decay)
            for average, buffer in self._copied:
                average.copy_(buffer)
        return stepped

    patch.setattr(EMAAddon, "optimizer_step", optimizer_step)


FAULTS = [
    (clip_before_unscale, "AMPAddon is not the hand-written loop: weights"),
    (divide_by_the_configured_window, "GradientAccumulationAddon is not the hand-written loop: weights"),
    (average_after_skipped_steps, "AMPAddon with EMAAddon is not the hand-written loop: "),
]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(("plant", "told"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_named(plant, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison names the add-on, or the pair of them, that it takes to go wrong."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        assert_is_by_hand(NAMES, CONFIGURATIONS[0])


# -------------------------------------------------------------------------------------------------- the matrix


def test_every_add_on_is_in_the_proof_or_said_to_be_elsewhere() -> None:
    import zae.addons

    known = PIECES.keys() | matrix.ELSEWHERE.keys()
    unknown = [name for name in zae.addons.__all__ if name.endswith("Addon") and name not in known]
    assert not unknown, f"put {unknown} into PIECES of tests/kit/matrix.py, or into ELSEWHERE with the reason"


def test_no_pair_is_refused_for_a_name() -> None:
    assert "both define" not in composition.page(), "two add-ons use a name by chance"


def test_the_loop_by_hand_imports_nothing_of_zae() -> None:
    tree = ast.parse(Path(inspect.getfile(oracle)).read_text())
    imported = [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    imported += [name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names]
    assert "torch" in imported
    assert not [name for name in imported if name.partition(".")[0] == "zae"]
