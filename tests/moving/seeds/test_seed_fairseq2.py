"""The snippets of fairseq2's page of its trainer, word for word, with units and readers of tests/kit/fairseq2_parts.py.

``Trainer(unit=...)`` is ``zae.addons.fairseq2.from_arguments(unit=...)``, which the message for ``zae.Trainer`` names.
The page's own ``__init__``, ``_do_run``, ``_run_step`` and ``_validate`` show how its trainer works: a class here that
defines one is told what is called instead. fairseq2 is not installed: ``TrainUnit`` is the class of the page, and its
registry of metrics and ``TorchProfiler`` are stand-ins with their names.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from kit.fairseq2_parts import FakeGang, Reader, ScoreUnit, Unit, batches, network, parallel_gangs
from kit.snippets import run, said_by
from zae import Trainer
from zae.addons.fairseq2 import from_arguments
from zae.testing import PlainTask


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


UNIT = """
    class TrainUnit(ABC, Generic[BatchT_contra]):
        \"\"\"Represents a unit to be used with Trainer.\"\"\"

        @abstractmethod
        def __call__(self, batch: BatchT_contra) -> tuple[Tensor, int | None]:
            \"\"\"Process batch and return loss and number of targets.\"\"\"

        @abstractmethod
        def set_step_nr(self, step_nr: int) -> None:
            \"\"\"Set current training step number.\"\"\"

        @property
        @abstractmethod
        def model(self) -> Module:
            \"\"\"The underlying model.\"\"\"
"""
EXAMPLE = """
    class TransformerTrainUnit(TrainUnit[TransformerBatch]):
      def __init__(self, model: TransformerModel) -> None:
          super().__init__(model)

      def __call__(self, batch: TransformerBatch) -> tuple[Tensor, int]:
          outputs = self._model(**batch)
          return outputs.loss, batch.num_tokens
"""


class Batch(dict[str, torch.Tensor]):
    num_tokens = 6


class Model(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=super().forward(inputs).square().sum())


def test_train_unit() -> None:
    """The abstract class, and the unit of the example on it: the loss is divided by the targets that it returns."""
    generic = {
        "ABC": ABC,
        "abstractmethod": abstractmethod,
        "Generic": Generic,
        "BatchT_contra": TypeVar("BatchT_contra"),
    }
    types = {"Tensor": torch.Tensor, "Module": nn.Module, "TransformerBatch": Batch, "TransformerModel": Model}
    base = run(UNIT, {**generic, **types})["TrainUnit"]

    class OfModel(base, Generic[TypeVar("T")]):
        def __init__(self, model: Any) -> None:
            self._model = model

        def set_step_nr(self, step_nr: int) -> None:
            self.step_nr = step_nr

        @property
        def model(self) -> Any:
            return self._model

    unit = run(EXAMPLE, {**types, "TrainUnit": OfModel})["TransformerTrainUnit"](Model(2, 1))
    by_hand = copy.deepcopy(unit.model)
    inputs = torch.arange(6.0).reshape(3, 2)
    reader = Reader([Batch(inputs=inputs)], 1)
    optimizer = torch.optim.SGD(unit.model.parameters(), lr=0.1)
    from_arguments(unit=unit, data_reader=reader, optimizer=optimizer, max_num_steps=1, max_gradient_norm=None)()
    (by_hand(inputs).loss / 6).backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    assert unit.step_nr == 1
    assert torch.allclose(unit.model.weight, by_hand.weight)


CALL = """
    # Example Trainer Configuration
    trainer = Trainer(
        # Basic parameters
        unit=train_unit,                     # Training unit to compute loss
        data_reader=data_reader,             # Data reader for training batches
        optimizer=optimizer,                 # Optimizer
        checkpoint_manager=checkpoint_mgr,   # Checkpoint manager
        root_gang=root_gang,                 # Root gang for distributed training

        # Optional parameters
        dp_gang=dp_gang,                     # Data parallel gang
        tp_gang=tp_gang,                     # Tensor parallel gang
        dtype=torch.float32,                 # Model data type
        lr_scheduler=lr_scheduler,           # Learning rate scheduler
        max_num_steps=100_000,               # Maximum training steps
        max_num_data_epochs=10,              # Maximum training epochs

        # Validation parameters
        valid_units=[valid_unit],            # Validation units
        valid_data_readers=[valid_reader],   # Validation data readers
        validate_every_n_steps=1_000,        # Validation frequency

        # Checkpoint parameters
        checkpoint_every_n_steps=5_000,      # Checkpoint frequency
        keep_last_n_checkpoints=5,           # Number of checkpoints to keep
        keep_best_n_checkpoints=3,           # Number of best checkpoints to keep

        # Metric parameters
        publish_metrics_every_n_steps=100,   # Metric publishing frequency
        tb_dir=Path("runs"),                 # TensorBoard directory
        metrics_dir=Path("metrics"),         # Metrics directory

        # Advanced parameters
        fp16_loss_scale=(128.0, 0.0001),    # Initial and min loss scale for fp16
        max_gradient_norm=None,              # Max gradient norm for clipping
        amp=False,                           # Enable automatic mixed precision
        anomaly_detection=False,             # Enable autograd anomaly detection
        seed=2                               # Random seed
    )
"""


def test_the_call() -> None:
    unit, gang = Unit(network()), FakeGang()
    gangs = parallel_gangs(gang)
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    given = {
        "train_unit": unit, "data_reader": Reader(batches(), 2), "optimizer": optimizer, "torch": torch, "Path": Path,
        "checkpoint_mgr": SimpleNamespace(_checkpoint_dir=Path("checkpoints")), "root_gang": gang, "dp_gang": gangs.dp,
        "tp_gang": gangs.tp, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "valid_unit": Unit(unit.model), "valid_reader": Reader(batches((3, 2), seed=9)),
    }  # fmt: skip
    said = said_by(CALL, {**given, "Trainer": Trainer})
    assert (
        "'unit'; here it is task_of(unit)(unit, ...), or from_arguments(unit=unit, ...), of zae.addons.fairseq2" in said
    )
    metrics = run(CALL, {**given, "Trainer": from_arguments})["trainer"]()
    assert (metrics["step"], metrics["epoch"]) == (30, 10)
    assert [path.name for path in Path("checkpoints").glob("step-*")] == ["step-00000030"]


DO_RUN = """
    def _do_run(self) -> None:
        while self._should_run_step():
            self._step_nr += 1

            # Run training step
            self._run_step()

            # Maybe validate
            if self._should_validate():
                self._validate()

            # Maybe checkpoint
            if self._should_checkpoint():
                self._checkpoint()
"""
RUN_STEP = """
    def _run_step(self) -> None:
        # Collect batches
        batches = self._next_batches()

        # Process each batch
        for batch in batches:
            # Forward pass
            loss, num_targets = self._unit(batch)

            # Backward pass
            self._loss_scaler.backward(loss)

            # Update parameters
            self._loss_scaler.run_optimizer_step(self._step_nr)
"""
VALIDATE = """
    def _validate(self) -> None:
        self._model.eval()

        with summon_fsdp_for_validation(self._model):
            unit_scores = []

            for unit, data_reader in zip(self._valid_units, self._valid_data_readers):
                unit_score = self._validate_unit(unit, data_reader)
                if unit_score is not None:
                    unit_scores.append(unit_score)

            self._valid_score = self._compute_valid_score(unit_scores)

        self._model.train()
"""


@pytest.mark.parametrize(
    ("text", "here"),
    [(DO_RUN, r"_do_run .* run\(n_epoch, loader\)"), (RUN_STEP, r"_run_step .* run_batch\(batch\)")],
)
def test_a_method_of_its_loop_is_not_called_and_said_so(text: str, here: str) -> None:
    namespace = run(text, {})
    name = next(each for each in namespace if each.startswith("_") and not each.startswith("__"))
    with pytest.warns(UserWarning, match=here):
        type("Own", (PlainTask,), {name: namespace[name]})


def test_validation_runs_as_its_page_says() -> None:
    """The model is in evaluation mode, its parameters are whole, units have scores, and training goes on."""
    seen: list[bool] = []

    class Watched(ScoreUnit):
        def __call__(self, batch: Any) -> Any:
            seen.append(self.model.training)
            return super().__call__(batch)

    assert "for unit, data_reader in zip(self._valid_units, self._valid_data_readers):" in VALIDATE
    unit = Unit(network(dropout=0.1))
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    metrics = from_arguments(
        unit=unit, data_reader=Reader(batches(), 2), optimizer=optimizer, max_num_steps=4, validate_every_n_steps=2,
        valid_units=[Watched(unit.model, "dev")], valid_data_readers=[Reader(batches((3, 2), seed=9), 1)],
        score_metric_name="score",
    )()  # fmt: skip
    assert seen != []
    assert not any(seen)
    assert unit.model.training
    assert [row["step"] for row in metrics["valid_metrics_history"]] == [2, 4]


def parts(**more: Any) -> dict[str, Any]:
    unit = Unit(network())
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    valid = {"valid_units": [ScoreUnit(unit.model, "dev")], "valid_data_readers": [Reader(batches((3, 2), seed=9), 1)]}
    call = {"unit": unit, "data_reader": Reader(batches(), 2), "optimizer": optimizer, "max_num_steps": 4, **valid}
    return {"call": call, "optimizer": optimizer, "Trainer": from_arguments, **more}


CALLED = ("Trainer(", "Trainer(**call, ")
EARLY = """
    def early_stopper(step_nr: int, score: float) -> bool:
        # Custom early stopping logic
        return score < threshold

    metric_descriptors = get_runtime_context().get_registry(MetricDescriptor)

    try:
        score_metric_descriptor = metric_descriptors.get(metric_name)
    except LookupError:
        raise UnknownMetricDescriptorError(metric_name) from None

    trainer = Trainer(
        early_stopper=early_stopper,
        score_metric_descriptor=score_metric_descriptor,
        lower_better=True,
    )
"""


def test_early_stopping() -> None:
    class UnknownMetricDescriptorError(Exception):
        pass

    registry = {"score": SimpleNamespace(name="score", higher_better=False)}
    context = SimpleNamespace(get_registry=lambda kind: registry)
    given = parts(get_runtime_context=lambda: context, MetricDescriptor=object, metric_name="score", threshold=1e9)
    found = run(EARLY, {**given, "UnknownMetricDescriptorError": UnknownMetricDescriptorError},
                ("Trainer(", "Trainer(**call, validate_every_n_steps=2, "))  # fmt: skip
    assert found["trainer"]()["step"] == 2  # Below the threshold at once.


SCHEDULE = """
    class CustomLRScheduler(LRScheduler):
        def get_lr(self) -> float:
            # Custom LR calculation
            return self.base_lr * decay_factor(self.step_nr)

    trainer = Trainer(
        lr_scheduler=CustomLRScheduler(optimizer),
    )
"""


def test_custom_learning_rate_schedule() -> None:
    """Its get_lr returns a number and reads attributes of fairseq2: torch's has a list of them, by last_epoch."""
    own = (
        ("-> float", "-> list[float]"),
        (
            "self.base_lr * decay_factor(self.step_nr)",
            "[each * decay_factor(self.last_epoch) for each in self.base_lrs]",
        ),
    )
    given = parts(LRScheduler=torch.optim.lr_scheduler.LRScheduler, decay_factor=lambda step: 0.5**step)
    run(SCHEDULE, given, CALLED, *own)["trainer"]()
    assert given["optimizer"].param_groups[0]["lr"] == 0.01 * 0.5**4


PROFILING = """
    num_skip_steps, num_record_steps = (100, 10)

    profile_dir = Path("logs/tb")

    profiler = TorchProfiler(
        num_skip_steps, num_record_steps, profile_dir, gangs.root
    )

    trainer = Trainer(
        profiler=profiler,
        ...
    )
"""


def test_profiling() -> None:
    """What has ``step()`` and is a context is told each step, as a profiler of torch is."""

    class TorchProfiler:
        def __init__(self, num_skip_steps: int, num_record_steps: int, folder: Path, gang: Any) -> None:
            self.steps = 0

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def step(self) -> None:
            self.steps += 1

    given = parts(TorchProfiler=TorchProfiler, gangs=SimpleNamespace(root=None), Path=Path)
    found = run(PROFILING, given, ("        profiler=profiler,\n        ...", "        **call, profiler=profiler"))
    found["trainer"]()
    assert found["profiler"].steps == 4
