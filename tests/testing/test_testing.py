"""`check_addon` passes what keeps the contract, and names what does not, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zae.addons
from kit import faulty_addons, faulty_holders
from kit.faulty_addons import (
    DropsClippingAddon,
    GoodAddon,
    LeavesContextAddon,
    LogsEverywhereAddon,
    TwiceWrongAddon,
)
from kit.right_addons import RIGHT
from kit.table import measured
from zae import AddOnBase, AddOnError, Every, Trainer, replaces
from zae.random_state import capture
from zae.testing import CHECKS, AddOnFault, check_addon
from zae.testing.watch import Settings, difference

FAULTS = faulty_addons.FAULTS + faulty_holders.FAULTS


@pytest.mark.sample(covering=1, of="check")
@pytest.mark.parametrize(
    ("add_on", "check", "told", "remedy"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_check_addon_names_a_seeded_fault(add_on: Any, check: str, told: str, remedy: str) -> None:
    """The message says what is wrong, in which check, and what to do."""
    with pytest.raises(AddOnFault, match=rf"{told}.*{remedy}.*\[{check}\]") as caught:
        check_addon(add_on, allow=CHECKS.keys() - {check})
    assert add_on.__name__ in str(caught.value)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    "add_on",
    [DropsClippingAddon, LogsEverywhereAddon],
)
def test_check_addon_finds_nothing_else_in_the_faulty_ones(add_on: Any) -> None:
    """All checks together find the one fault of an add-on: a check answers for its own fault alone."""
    check = next(check for faulty, check, *_ in FAULTS if faulty is add_on)
    with pytest.raises(AddOnFault, match=rf" has 1 fault:\s+1\. .*\[{check}\]$"):
        check_addon(add_on)


def test_check_addon_leaves_the_process_as_it_was() -> None:
    """What one check leaves behind is not the baseline of the next, and is put back at the end."""
    settings, streams = Settings(), capture()
    with pytest.raises(AddOnFault, match="leaves a context open after an exception in train_step: the anomaly mode"):
        check_addon(LeavesContextAddon)
    assert settings.restore() == {}
    assert difference(streams, capture()) is None


@pytest.mark.sample(count=3)
@pytest.mark.parametrize(("add_on", "options"), RIGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_check_addon_raises_no_alarm_for_what_users_write(add_on: Any, options: Any) -> None:
    check_addon(add_on, **options)


def test_check_addon_refuses_what_the_class_itself_refuses() -> None:
    """A step without super(), or an override of run_batch, does not even become a class."""
    with pytest.raises(AddOnError, match="without calling super"):
        type("Plain", (AddOnBase,), {"train_step": lambda self, batch: {}, "__doc__": "Drop the step."})
    with pytest.raises(AddOnError, match="run_batch"):
        type("Loop", (AddOnBase,), {"run_batch": lambda self, batch: None, "__doc__": "Another loop."})


class ReachesSuperAddon(AddOnBase):
    """Call super() in a helper."""

    layer = "loop"

    def clip(self) -> None:
        self._clip_twice_as_much(2)

    def _clip_twice_as_much(self, factor: float) -> None:
        for parameter in self.parameters:
            parameter.grad.mul_(factor)
        super().clip()


def test_a_helper_may_call_super_and_dead_code_does_not() -> None:
    """What the class cannot see of super(), the check of an add-on counts."""
    check_addon(ReachesSuperAddon, allow=CHECKS.keys() - {"class", "super", "clip"})
    with pytest.raises(AddOnFault, match=r"forgets super\(\)\.logging\(\): of \d+ calls of logging, 0 reached"):
        check_addon(DeadCodeAddon, allow=CHECKS.keys() - {"super"})


class DeadCodeAddon(AddOnBase):
    """Mention super() where it is never called."""

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        if self is None:
            super().logging(step_dict, weight)


def test_check_addon_passes_a_good_one() -> None:
    check_addon(GoodAddon)
    check_addon(GoodAddon, start=3, beside=[zae.addons.AMPAddon, zae.addons.EMAAddon])


class DoublesAddon(AddOnBase):
    """Clip in another way, and say so."""

    layer = "loop"

    @replaces
    def clip(self) -> None:
        for parameter in self.parameters:
            parameter.grad.sign_()


def test_check_addon_takes_a_declared_replacement() -> None:
    """@replaces passes the check of super(); that clipping is gone has to be allowed by name."""
    check_addon(DoublesAddon, allow=["clip"])
    with pytest.raises(AddOnFault, match="drops clipping"):
        check_addon(DoublesAddon)


def test_check_addon_tells_all_faults_at_once_and_refuses_unknown_checks() -> None:
    with pytest.raises(AddOnFault, match=r"2 faults:[\s\S]*1\. [\s\S]*2\. "):
        check_addon(TwiceWrongAddon)
    with pytest.raises(AddOnError, match="the checks are class, pickle"):
        check_addon(GoodAddon, allow=["clipping"])
    with pytest.raises(AddOnFault, match="is not an add-on"):
        check_addon(Trainer)


OWN = {
    "ActivationOffloadAddon": {"offload_modules": torch.nn.Linear},
    "AMPAddon": {"precision": "fp16", "loss_scale": (2.0**20, 1.0)},
    "AnomalyAddon": {},
    "EMAAddon": {"decay": 0.5},
    "EarlyStoppingAddon": {"patience": 100},
    "GradientAccumulationAddon": {"gradient_accumulation_steps": 2},
    "FSDPAddon": {},
    "GradientCheckpointingAddon": {"checkpoint_modules": torch.nn.Linear, "transient": ["_undo_checkpointing"]},
    "JSONLLoggerAddon": {"jsonl_path": "log.jsonl"},
    "MultiGPUAddon": {},
    "PrefetchAddon": {},
    "ProfilerAddon": {
        "profile_dir": "profile",
        "profile_schedule": (1, 1, 2, 1),
        "transient": [
            "_profiler",
            "_profiled",
            "profile_table",
        ],
        "allow": ["ranks"],
    },  # Each rank writes a trace of its own.
    "LedgerAddon": {"ledger_path": "ledger.jsonl", "ledger_every": Every(steps=100)},
    "SpikeGuardAddon": {
        "spike_threshold": 1e9,
        "transient": ["_spike"],
    },
    "StateManagerAddon": {"save_path": "save", "transient": ["checkpoints", "checkpointer", "_crash"]},
    "TensorParallelAddon": {},
    "ThroughputAddon": {"transient": ["_meter", "step_flops"]},
    "TorchMetricsAddon": {**measured(("train", "valid")), "transient": ["_torch_metrics"]},
    "TensorBoardLoggerAddon": {"log_dir": "board"},
}


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("name", "options"), [("AMPAddon", {"precision": "fp32"}), ("GradientAccumulationAddon", {})], ids=str
)
def test_check_addon_passes_our_own_when_they_are_idle(name: str, options: Any) -> None:
    check_addon(getattr(zae.addons, name), **options)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", [name for name in OWN if name in zae.addons.__all__])
def test_check_addon_passes_our_own(name: str) -> None:
    check_addon(getattr(zae.addons, name), **OWN[name])


def test_every_check_is_shown_by_a_fault_of_check_addon() -> None:
    assert {check for _, check, *_ in FAULTS} == set(CHECKS)
