"""plan(..., measure_activations=True): the bytes that the forward of a batch keeps for its backward."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from kit import matrix
from kit.ranks import each_rank
from zae import ConfigError, Trainer
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    AutoBatchAddon,
    CompileAddon,
    FSDPAddon,
    GradientCheckpointingAddon,
    MultiGPUAddon,
    PipelineAddon,
    StateManagerAddon,
)
from zae.cli import main
from zae.common import random_state
from zae.preview.activations import _Storages
from zae.preview.memory import Memory

SAMPLES = 32
FLOAT = 4


class Task(Trainer):
    """The backward of its loss needs the output of the model; the loss itself is a number."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), block(), block(), block(), nn.Linear(8, 2))


def build(*add_ons: Any, model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> Any:
    torch.manual_seed(0)
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def measured(*add_ons: Any, batch: Any = None, **options: Any) -> Any:
    batch = torch.ones(SAMPLES, 4) if batch is None else batch
    return build(*add_ons, **options).plan(1, [batch], measure_activations=True)


DATA = [torch.ones(SAMPLES, 4)] * 3


class Measuring(Task):
    """It draws a random number in each step, and may measure after each epoch."""

    measures = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch + torch.rand(1)).square().mean()}

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.measures:
            forward = self.unwrap()[1].forward
            assert self.plan(3, DATA, measure_activations=True).memory.activations
            assert self.unwrap()[1].forward is forward


def test_they_are_those_counted_by_hand() -> None:
    """A linear layer keeps its input, a ReLU its result, and the square its input; sums and biases keep nothing."""
    kept = 8 + 3 * (32 + 8) + 2  # The first layer's result; in each block that of the ReLU and that of the block.
    assert measured().memory.activations == kept * SAMPLES * FLOAT + FLOAT
    recomputed = 8 + 3 * 8 + 2  # Of a block that is computed again, the input.
    assert measured(GradientCheckpointingAddon).memory.activations == recomputed * SAMPLES * FLOAT + FLOAT


def test_what_matmuls_keep_is_between() -> None:
    sizes = [
        measured(GradientCheckpointingAddon, checkpoint_modules=["1", "2"], **options).memory.activations
        for options in ({}, {"checkpoint_keep": "matmuls"})
    ]
    assert sizes[0] < sizes[1] <= measured().memory.activations


def test_bf16_keeps_about_half() -> None:
    """The precision is chosen as in a run; the weights in bfloat16 are kept too."""
    batch = torch.ones(1024, 4)
    whole = measured(batch=batch).memory.activations
    half = measured(AMPAddon, precision="bf16", batch=batch).memory.activations
    assert 0.5 * whole < half < 0.55 * whole


def test_views_in_place_results_and_buffers_are_not_counted_twice() -> None:
    """The view of the batch is the batch, the ReLU overwrites its input, and the statistics were there before."""
    layers = nn.Flatten(), nn.Linear(4, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 2)
    found = measured(model=nn.Sequential(*layers), batch=torch.ones(SAMPLES, 2, 2)).memory.activations
    of_the_batch = 2 * 8  # Mean and inverse deviation.
    assert found == ((8 + 8 + 2) * SAMPLES + of_the_batch) * FLOAT + FLOAT


def test_they_are_those_of_the_parts_of_a_batch() -> None:
    """Where AutoBatchAddon divides each batch; the largest part of 32 samples is then one of 11."""
    expected = measured(batch=torch.ones(11, 4)).memory.activations
    assert measured(AutoBatchAddon, micro_batch_size=12).memory.activations == expected
    assert measured(AutoBatchAddon).memory.activations == measured().memory.activations


def test_the_plan_shows_them_and_adds_them() -> None:
    plain, plan = build().plan(1, [torch.ones(SAMPLES, 4)]), measured()
    assert plain.memory.activations is None
    assert "kB and activations: parameters" in str(plain)
    entries = plan.memory.entries()
    assert entries.pop("activations") == plan.memory.activations
    assert entries == plain.memory.entries()
    assert plan.memory.total == plain.memory.total + plan.memory.activations
    assert "memory     30.4 kB: parameters 6.86 kB, gradients 6.86 kB, activations 16.6 kB" in str(plan)


def test_a_larger_step_of_the_optimizer_is_the_peak() -> None:
    """Activations are gone then."""
    memory = Memory({}, buffers=100, peaks={"the optimizer's step": 50})
    memory.activations = 20
    assert memory.total == 150
    said = "150 bytes: parameters 100 bytes, the optimizer's step 50 bytes; activations 20 bytes, freed before"
    assert str(memory).startswith(said)
    memory.activations = 60
    assert memory.entries() == {"parameters": 100, "activations": 60}


@pytest.mark.parametrize(
    ("add_on", "reason"),
    [
        (PipelineAddon, "plan() does not start the ranks of PipelineAddon; plan without it"),
        (AccelerateAddon, "plan() does not start the ranks of AccelerateAddon; plan without it"),
        (CompileAddon, "the model is compiled, and the compiler decides what is kept"),
    ],
)
def test_what_is_not_measured_is_a_note(add_on: Any, reason: str) -> None:
    plan = measured(add_on)
    assert plan.memory.activations is None
    assert [note for note in plan.notes if note.startswith(f"activations are not measured: {reason}")]


def test_a_loader_that_cannot_be_tried_and_a_lazy_model_are_notes() -> None:
    plan = build().plan(1, (torch.ones(2, 4) for _ in range(3)), measure_activations=True)
    assert [note for note in plan.notes if note.startswith("activations are not measured: a batch of generator")]
    lazy = Task(nn.LazyLinear(2), "cpu", optimizer=torch.optim.SGD)
    notes = lazy.plan(1, [torch.ones(2, 4)], measure_activations=True).notes
    assert "activations are not measured: the model is lazy: its first batch makes its weights" in notes


def test_a_step_that_fails_is_one_fault() -> None:
    """Without a valid_loader the step is tried for its metrics too; with one, for its activations alone."""
    wrong, right = [torch.ones(2, 3)], [torch.ones(2, 4)]
    for valid in (None, right):
        (fault,) = build().plan(1, wrong, valid, measure_activations=True).faults
        assert fault.startswith("one batch of loader was tried, and RuntimeError: mat1 and mat2")


def test_only_a_bool_is_taken() -> None:
    with pytest.raises(ConfigError, match="measure_activations=1; it must be True or False"):
        build().plan(1, [torch.ones(2, 4)], measure_activations=1)


def test_a_run_that_measures_between_its_epochs_is_bitwise_that_without() -> None:
    """The copy sets up its own add-ons: the model of the run stays checkpointed, and no random number is drawn."""
    ends = []
    for measures in (False, True):
        random_state.seed_everything(0)
        model = network()
        add_ons = AMPAddon, GradientCheckpointingAddon, StateManagerAddon
        trainer = Measuring.add_on(*add_ons)(
            model, "cpu", optimizer=torch.optim.Adam(model.parameters()), save_path=f"run{measures}", log_bar=False
        )
        trainer.measures = measures
        trainer.run(2, DATA)
        ends.append((model.state_dict(), trainer.optimizer.state_dict(), repr(random_state.capture())))
    assert matrix.first_difference(*ends) is None


def test_the_command_measures_them(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(
        "import torch, zae\n"
        "class Task(zae.Trainer):\n"
        "    def train_step(self, batch):\n"
        "        return {'loss': self.model(batch).square().mean()}\n"
        "    test_step = train_step\n"
        "def make_trainer(**more):\n"
        "    return Task(torch.nn.Linear(4, 2), 'cpu', optimizer=torch.optim.SGD), {\n"
        "        'n_epoch': 1, 'loader': [torch.ones(8, 4)], **more}\n"
        "def wrong(): return make_trainer(measure_activations=True)\n"
    )
    assert main(["plan", "train.py", "--measure-activations", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["activations"] == 8 * 2 * FLOAT + FLOAT
    assert main(["plan", "train.py:wrong"]) == 2
    assert "run() has no argument 'measure_activations'" in capsys.readouterr().err


ENGINES: list[tuple[Any, dict[str, Any]]] = [
    (MultiGPUAddon, {}),
    (FSDPAddon, {}),
    (FSDPAddon, {"reshard_after_forward": False}),
    (FSDPAddon, {"activation_checkpointing": True}),
    (FSDPAddon, {"fsdp_blocks": ["1", "2"], "activation_checkpointing": True}),
]


@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_those_of_a_rank_are_those_of_one_process(engine: Any, options: Any) -> None:
    """Blocks that the engine computes again keep their inputs, as with GradientCheckpointingAddon."""
    names = options.get("fsdp_blocks")
    same: dict[str, Any] = {"add_ons": ()}
    if options.get("activation_checkpointing"):
        same = {"add_ons": (GradientCheckpointingAddon,), "checkpoint_modules": names}
    expected = measured(*same.pop("add_ons"), **same).memory.activations
    for devices in (["cpu"], ["cpu", "cpu"]):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD
        trainer = Task.add_on(engine)(network(), devices, optimizer=optimizer, log_bar=False, **options)
        plan = trainer.plan(1, [torch.ones(SAMPLES, 4)] * 2, measure_activations=True)
        assert plan.memory.activations == expected
        gathered = plan.memory.peaks.get("gathered blocks", 0)
        if gathered:
            assert plan.memory.entries()["gathered blocks"] == gathered
        assert plan.memory.entries()["activations"] == expected


class Recording(Task):
    """Note what the backward of a step needs, beside parameters, on a rank."""

    kept = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        storages = _Storages()
        with storages:
            out = super().train_step(batch)
        gc.collect()
        self.kept = storages.count(self.device)
        return out


def of_a_rank(engine: Any, options: Any) -> tuple[int, int]:
    torch.manual_seed(0)
    trainer = Recording.add_on(engine)(network(), "cpu", optimizer=torch.optim.SGD, log_bar=False, **options)
    batches = [torch.ones(SAMPLES, 4)] * 2
    planned = trainer.plan(1, batches, measure_activations=True).memory.activations
    trainer.run(1, batches)
    assert trainer.world_size == 2
    return planned, trainer.kept


@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon])
def test_a_rank_keeps_what_the_plan_says(engine: Any) -> None:
    """In the process of a rank; FSDP makes the whole parameters too, which the plan counts as gathered blocks."""
    gathered = sum(each.nbytes for each in network().parameters()) if engine is FSDPAddon else 0
    for planned, kept in each_rank(2, of_a_rank, engine, {}):
        assert kept == planned + gathered


def test_a_policy_of_types_is_a_note() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    trainer = Task.add_on(FSDPAddon)(network(), ["cpu"] * 2, optimizer=torch.optim.SGD, mp_policy=policy)
    plan = trainer.plan(1, [torch.ones(SAMPLES, 4)] * 2, measure_activations=True)
    assert "activations are not measured: mp_policy of FSDPAddon changes what is kept" in str(plan.notes)
