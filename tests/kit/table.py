"""Every add-on with its options: one that changes nothing, one that bites, and the same in a loop written by hand."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kit import hand
from zae import AddOnBase, AddOnConflict, Trainer
from zae.addons import (
    AccelerateAddon,
    ActivationOffloadAddon,
    AMPAddon,
    AnomalyAddon,
    CallbackAddon,
    CompileAddon,
    DeepSpeedAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    HuggingFaceAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    MLflowLoggerAddon,
    MultiGPUAddon,
    NeptuneLoggerAddon,
    PEFTAddon,
    PipelineAddon,
    PrefetchAddon,
    ProfilerAddon,
    SpikeGuardAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
    TensorParallelAddon,
    ThroughputAddon,
    TorchMetricsAddon,
    TrackioLoggerAddon,
    WandBLoggerAddon,
)
from zae.checkpoint.encoding import encode

Options = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Entry:
    """One add-on with one way to set it.

    Attributes
    ----------
    add_on : type
        The class.
    neutral, biting : callable
        Options, of a folder of one's own: with the first ones it changes nothing, bitwise.
    by_hand : mapping
        What `hand.train` is given to do the same as with the options that bite.
    packages : tuple of str
        What it needs beside zae's own requirements.
    stateful : bool
        Whether training changes something in it that a resume needs.
    name : str
        The key of its state.
    transient : tuple of str
        Attributes that change and that a resume does not need.
    comparable : callable
        Leaves out of its state what is not the same in two equal runs.
    """

    add_on: type[AddOnBase]
    neutral: Options
    biting: Options
    by_hand: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    stateful: bool = False
    name: str = ""
    transient: tuple[str, ...] = ()
    comparable: Callable[[Any], Any] = copy.deepcopy
    variant: str = ""

    @property
    def id(self) -> str:
        return self.add_on.__name__ + (f"-{self.variant}" if self.variant else "")

    @property
    def key(self) -> str:
        return self.name or self.add_on.__name__


def fixed(**options: Any) -> Options:
    """Options that need no folder."""
    return lambda folder: options


def logger(add_on: type[AddOnBase], options: Options, *packages: str) -> Entry:
    """A logger: its clients do nothing here, what they write is in the tests of each."""
    opened = ("_group", "_failed", "_resumed_at", "_run_id")
    return Entry(add_on, options, options, {}, packages, stateful=True, name="LoggerAddon", transient=opened,
                 comparable=lambda own: own["records"])  # fmt: skip


class Watcher:
    """A callback that only looks, at every kind of event, and counts."""

    state_attributes = ("calls", "epochs")

    def __init__(self) -> None:
        self.calls, self.epochs = 0, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.calls += 1
        assert next(model.parameters()).isfinite().all()

    def on_substep_end(self, args, state, control, **kwargs):
        self.calls += 100

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.calls += 10_000

    def on_prediction_step(self, args, state, control, **kwargs):
        assert state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        assert logs["epoch"] == state.epoch

    def on_epoch_end(self, trainer):
        self.epochs.append([trainer.progress_checker.epoch, trainer.state.epoch])


_TRACED = {"compile_backend": "eager"}
_COMPILED = ("_compiled", "_has_settings", "compile_report")
# Else the client warns of a GPU that is not there, which is an error here, and leaves behind the threads it has begun.
_QUIET = {"capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False}


def measured(splits: tuple[str, ...]) -> dict[str, Any]:
    """Options of a metric that has to count each step."""
    from torchmetrics import MeanMetric

    given = {"torch_metrics": {"measured": MeanMetric()}, "torch_metrics_inputs": {"measured": "loss"}}
    return {**given, "torch_metrics_splits": splits}


TABLE = [
    Entry(
        AMPAddon, fixed(precision="fp32"), fixed(precision="bf16"), {"precision": "bf16"},
        stateful=True, variant="bf16",
    ),
    Entry(
        # From so large a scale the first steps overflow and are skipped, and then it is small enough.
        AMPAddon, fixed(precision="fp32"), fixed(precision="fp16", loss_scale=(2.0**19, 1.0)),
        {"precision": "fp16", "scale": 2.0**19}, stateful=True, variant="fp16",
    ),
    Entry(
        AMPAddon, fixed(precision="fp32", dtype="fp32"), fixed(dtype="bf16"), {"precision": "bf16", "dtype": "bf16"},
        stateful=True, variant="weights",
    ),
    Entry(
        GradientAccumulationAddon, fixed(gradient_accumulation_steps=1), fixed(gradient_accumulation_steps=4),
        {"accumulate": 4},
    ),
    Entry(
        EMAAddon, fixed(decay=0.0), fixed(decay=0.75), {"decay": 0.75},
        stateful=True, transient=("_averaged", "_columns", "_copied", "_paired", "_places"),
    ),
    Entry(
        EarlyStoppingAddon, fixed(patience=10**6), fixed(patience=1, delta=9.0), {"patience": 1, "delta": 9.0},
        stateful=True,
    ),
    Entry(
        SpikeGuardAddon, fixed(spike_threshold=1e9), fixed(spike_warmup=3, spike_window=8, spike_threshold=1e6),
        stateful=True, transient=("_spike",),
    ),
    Entry(
        CallbackAddon, fixed(callbacks=[Watcher]), fixed(callbacks=[Watcher]), stateful=True,
        transient=("_callbacks",),
        comparable=lambda own: own["callback_states"],
    ),
    Entry(
        StateManagerAddon,
        lambda folder: {"save_path": folder / "neutral", "overwrite": True},
        lambda folder: {"save_path": folder / "biting", "save_every": 4, "keep_last": 1, "overwrite": True},
        stateful=True, transient=("checkpoints", "checkpointer", "_resumption", "_crash"),
        comparable=lambda own: max(own["scores"]),  # The earlier ones are in the first one's folder.
    ),
    # The task has its own steps here; those of the add-on are in tests/addons/huggingface/.
    Entry(HuggingFaceAddon, fixed(), fixed(num_train_epochs=1), stateful=True),
    Entry(
        LedgerAddon,
        lambda folder: {"ledger_path": folder / "neutral" / "ledger.jsonl", "ledger_every": 10**6},
        lambda folder: {"ledger_path": folder / "biting" / "ledger.jsonl"},
        transient=("_file", "_stages", "_loaders"),
    ),
    # Of a network with BatchNorm and dropout.
    Entry(
        GradientCheckpointingAddon, fixed(checkpoint_modules=["*"]),
        fixed(checkpoint_modules=["*"], checkpoint_keep="matmuls"), transient=("_undo_checkpointing",),
    ),
    # On the CPU it changes nothing; with hooks that copy it is in tests/addons/test_activation_offload.py.
    Entry(ActivationOffloadAddon, fixed(offload_modules=["*"]), fixed(offload_modules=["*"], offload_min_bytes=0)),
    # The model's calls, traced but not compiled: that is bitwise the eager step, and takes little time.
    Entry(CompileAddon, fixed(**_TRACED), fixed(**_TRACED), transient=_COMPILED),
    # On one device it changes nothing; what they do on several is in tests/addons/test_mpu.py, tests/engines.
    Entry(MultiGPUAddon, fixed(), fixed(timeout=5.0), transient=("_micro", "_loaded", "_placed")),
    Entry(AccelerateAddon, fixed(), fixed(timeout=5.0), transient=("_micro", "_placed", "accelerator"),
          packages=("accelerate",)),
    Entry(TensorParallelAddon, fixed(), fixed(timeout=5.0), transient=("_micro", "_placed")),
    Entry(FSDPAddon, fixed(), fixed(timeout=5.0), transient=("_micro", "_placed", "_is_prepared")),
    Entry(DeepSpeedAddon, fixed(), fixed(timeout=5.0), transient=("_micro", "_placed")),
    Entry(PipelineAddon, fixed(), fixed(timeout=5.0), transient=("_micro", "_placed")),
    # Of a model that is trained as a whole it leaves nothing out; with adapters it is in tests/addons/test_peft.py.
    Entry(PEFTAddon, fixed(), fixed(), stateful=True, transient=("_compared",)),
    Entry(
        TorchMetricsAddon, lambda folder: measured(("valid",)), lambda folder: measured(("train", "valid")),
        stateful=True, transient=("_torch_metrics",), packages=("torchmetrics",),
    ),
    # On the CPU it changes nothing; that it does not either on a device is in its docstring and in its own tests.
    Entry(PrefetchAddon, fixed(), fixed(), transient=("_side", "_why_not", "_has_warned")),
    Entry(
        ProfilerAddon,
        lambda folder: {"profile_dir": folder / "neutral", "profile_schedule": (99, 1, 1, 1)},
        lambda folder: {"profile_dir": folder / "biting", "profile_schedule": (1, 1, 1, 2)},
        transient=("_profiler", "_profiled", "profile_table"),
    ),
    Entry(AnomalyAddon, fixed(anomaly_steps=(98, 99)), fixed(), transient=("_anomaly",)),
    Entry(
        ThroughputAddon, fixed(count_flops=False), fixed(peak_flops=1e12),
        transient=("_meter", "step_flops"),
    ),
    logger(JSONLLoggerAddon, lambda folder: {"jsonl_path": folder / "log.jsonl"}),
    logger(TensorBoardLoggerAddon, lambda folder: {"log_dir": folder / "events"}, "tensorboard"),
    logger(WandBLoggerAddon, fixed(web_logger={"wandb": {"project": "p", "mode": "disabled"}}), "wandb"),
    logger(NeptuneLoggerAddon, fixed(web_logger={"neptune": {"project": "w/p", "mode": "debug", **_QUIET}}), "neptune"),
    logger(
        MLflowLoggerAddon,
        lambda folder: {"web_logger": {"mlflow": {"experiment_name": "e", "tracking_uri": f"file:{folder}/mlruns"}}},
        "mlflow",
    ),
    logger(TrackioLoggerAddon, fixed(web_logger={"trackio": {"project": "p"}}), "trackio"),
]  # fmt: skip


class Task(Trainer):
    """A classifier."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}

    def test_step(self, batch):
        inputs, targets = batch
        output = self.model(inputs)
        accuracy = (output.argmax(1) == targets).float().mean()
        return {"loss": nn.functional.cross_entropy(output, targets), "accuracy": accuracy}


def composed(*entries: Entry) -> type[Trainer]:
    return Task.add_on(*(entry.add_on for entry in entries))


def parts(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = hand.network(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def build(entries: tuple[Entry, ...] | list[Entry], setting: str, folder: Path, **options: Any) -> Any:
    """A fresh trainer with add-ons, all "neutral" or all "biting"."""
    model, optimizer = parts()
    for entry in entries:
        for key, value in getattr(entry, setting)(folder).items():
            # Every web logger reads its own part of the one option.
            options[key] = {**options.get(key, {}), **value} if isinstance(value, Mapping) else value
    options.setdefault("gradient_clip", 0.5)
    return composed(*entries)(model, "cpu", optimizer=optimizer, **options)


DIVIDED = {FSDPAddon, PipelineAddon, TensorParallelAddon}
"""What divides a model, and is refused beside weights in bfloat16."""


def compatible(*entries: Entry) -> bool:
    """Whether these may stand together: two fillers of a slot may not, nor what an add-on refuses by name."""
    add_ons = {entry.add_on for entry in entries}
    if add_ons & DIVIDED and any(entry.variant == "weights" for entry in entries):
        return False
    try:
        Task.add_on(*add_ons)
    except AddOnConflict:
        return False
    return len(add_ons) == len(entries)


def fingerprint(value: Any) -> str:
    """SHA-256 of a nested state, to the last bit."""
    structure, tensors = encode(value)
    sha = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(hand.digest(tensors[name]).encode())
    return sha.hexdigest()


def core_of(trainer: Any) -> dict[str, Any]:
    """All that training has left behind, but for what add-ons keep."""
    state = trainer.state_dict()
    progress = {k: v for k, v in state["progress"].items() if k != "run_starts"}
    records = {k: v for k, v in state["records"].items() if k not in ("logged", "log_train")}
    # What ThroughputAddon measures is another time in each run.
    records["log_history"] = [
        {key: value for key, value in row.items() if not key.startswith("throughput/")}
        for row in records["log_history"]
    ]
    return {
        **{key: state[key] for key in ("model", "optimizer", "scheduler")},
        "progress": progress,
        "records": records,
        "random": state["position"]["present"],
    }
