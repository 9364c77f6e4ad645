"""The section on what a step costs with an add-on, in docs/reference/options.md, from the measured figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from _generators import ROOT

COSTS = ROOT / "benchmarks" / "addon_costs.json"

OPTIONS = {
    "AMPAddon": 'precision="auto"',
    "ActivationOffloadAddon": "offload_modules=torch.nn.Linear",
    "EMAAddon": "decay=0.98",
    "EarlyStoppingAddon": "patience=3",
    "GradientAccumulationAddon": "gradient_accumulation_steps=4",
    "GradientCheckpointingAddon": "checkpoint_modules=torch.nn.Linear",
    "JSONLLoggerAddon": 'jsonl_path="runs/log.jsonl"',
    "LedgerAddon": 'ledger_path="runs/ledger.jsonl"',
    "ProfilerAddon": 'profile_dir="runs/profile"',
    "SpikeGuardAddon": "spike_threshold=10.0",
    "StateManagerAddon": 'save_path="runs/saved", resume="auto"',
    "TensorBoardLoggerAddon": 'log_dir="runs/board"',
}
"""The options with which the cost of an add-on is measured; without an entry, those are the defaults."""

NOT_MEASURED = {
    "engines, which need several ranks": (
        "AccelerateAddon", "DeepSpeedAddon", "FSDPAddon", "MultiGPUAddon", "PipelineAddon", "TensorParallelAddon"),
    "loggers whose service a thread sends records to": (
        "MLflowLoggerAddon", "NeptuneLoggerAddon", "TrackioLoggerAddon", "WandBLoggerAddon"),
    "what does nothing on a CPU": ("ActivationOffloadAddon",),
    "what changes the step itself": ("CompileAddon", "HuggingFaceAddon", "PEFTAddon"),
    "the time of torchmetrics": ("TorchMetricsAddon",),
}  # fmt: skip
"""Why the cost of some add-ons is not measured."""


def section(add_ons: Iterable[str]) -> str:
    """Return how the costs are measured, the figures, and what is not measured."""
    measured = json.loads(COSTS.read_text(encoding="utf-8"))
    bounds = [bound for interval in measured["control"].values() for bound in interval]
    tiny, small = (f"{measured['steps_us'][key] / 1000:.2g} ms" for key in ("free", "cnn"))
    left_out = "; ".join(
        f"{reason} ({', '.join(f'`{name}`' for name in names)})" for reason, names in NOT_MEASURED.items()
    )
    return "\n".join([
        "The CPU time of a run with an add-on, in multiples of the same run without it: the median and "
        f"{measured['spread']} (`python benchmarks/addon_costs.py`; {measured['machine']}). The two take turns in one "
        f"process. A step of the tiny network takes {tiny} over a list of batches, one of the small convolutional "
        f"network {small}. Two runs without add-ons gave {min(bounds):.2f} to {max(bounds):.2f}: a figure in this "
        "range is noise.",
        "",
        "| add-on | tiny network | small convolutional network |\n|---|---|---|",
        *rows(add_ons, measured["add_ons"]),
        "",
        f"Not measured: {left_out}.",
    ])  # fmt: skip


def rows(add_ons: Iterable[str], measured: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Yield a row for each add-on whose cost is measured."""
    unmeasured = {name for names in NOT_MEASURED.values() for name in names}
    for name in add_ons:
        if name in unmeasured:
            continue
        if name not in measured:
            raise SystemExit(
                f"the cost of {name} is not measured: run python benchmarks/addon_costs.py {name}, or write into "
                "NOT_MEASURED of docs/_generators/costs.py why it is not"
            )
        figures = [f"{middle:.2f} ({low:.2f} to {high:.2f})"
                   for low, middle, high in (measured[name][key] for key in ("free", "cnn"))]  # fmt: skip
        setting = f", `{OPTIONS[name]}`" if name in OPTIONS else ""
        yield f"| `{name}`{setting} | {' | '.join(figures)} |"
