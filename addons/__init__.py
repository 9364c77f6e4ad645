"""The add-ons that come with zae; a package that one of them needs is imported when a trainer is set up."""

from typing import TYPE_CHECKING

from zae.common.lazy import load as _load
from zae.common.lazy import missing_name as _missing_name

if TYPE_CHECKING:
    from zae.addons.accelerate import AccelerateAddon
    from zae.addons.accumulation import GradientAccumulationAddon
    from zae.addons.activation_offload import ActivationOffloadAddon
    from zae.addons.amp import AMPAddon
    from zae.addons.anomaly import AnomalyAddon
    from zae.addons.auto_batch import AutoBatchAddon
    from zae.addons.callbacks import CallbackAddon
    from zae.addons.compile import CompileAddon
    from zae.addons.deepspeed import DeepSpeedAddon
    from zae.addons.early_stopping import EarlyStoppingAddon
    from zae.addons.ema import EMAAddon
    from zae.addons.fsdp import FSDPAddon
    from zae.addons.gradient_checkpointing import GradientCheckpointingAddon
    from zae.addons.huggingface import HuggingFaceAddon
    from zae.addons.jsonl_logger import JSONLLoggerAddon
    from zae.addons.ledger import LedgerAddon
    from zae.addons.logger import LoggerAddon, WebLoggerAddon
    from zae.addons.mlflow_logger import MLflowLoggerAddon
    from zae.addons.mpu import MultiGPUAddon
    from zae.addons.neptune_logger import NeptuneLoggerAddon
    from zae.addons.peft import PEFTAddon
    from zae.addons.pipeline import PipelineAddon
    from zae.addons.prefetch import PrefetchAddon
    from zae.addons.profiler import ProfilerAddon
    from zae.addons.report import ReportAddon
    from zae.addons.silent_fault_guard import SilentFaultGuardAddon
    from zae.addons.spike_guard import SpikeGuardAddon
    from zae.addons.state_manager import StateManagerAddon
    from zae.addons.tensor_parallel import TensorParallelAddon
    from zae.addons.tensorboard_logger import TensorBoardLoggerAddon
    from zae.addons.throughput import ThroughputAddon
    from zae.addons.torch_metrics import TorchMetricsAddon
    from zae.addons.trackio_logger import TrackioLoggerAddon
    from zae.addons.wandb_logger import WandBLoggerAddon

if __name__ != "zae.addons":  # The root of a checkout is on sys.path: a second copy of each class would come from here.
    raise ImportError(f"this is the package zae.addons, not {__name__}; write: from zae.addons import AMPAddon")

__all__ = [
    "AMPAddon",
    "AccelerateAddon",
    "ActivationOffloadAddon",
    "AnomalyAddon",
    "AutoBatchAddon",
    "CallbackAddon",
    "CompileAddon",
    "DeepSpeedAddon",
    "EMAAddon",
    "EarlyStoppingAddon",
    "FSDPAddon",
    "GradientAccumulationAddon",
    "GradientCheckpointingAddon",
    "HuggingFaceAddon",
    "JSONLLoggerAddon",
    "LedgerAddon",
    "LoggerAddon",
    "MLflowLoggerAddon",
    "MultiGPUAddon",
    "NeptuneLoggerAddon",
    "PEFTAddon",
    "PipelineAddon",
    "PrefetchAddon",
    "ProfilerAddon",
    "ReportAddon",
    "SilentFaultGuardAddon",
    "SpikeGuardAddon",
    "StateManagerAddon",
    "TensorBoardLoggerAddon",
    "TensorParallelAddon",
    "ThroughputAddon",
    "TorchMetricsAddon",
    "TrackioLoggerAddon",
    "WandBLoggerAddon",
    "WebLoggerAddon",
]

_HOMES = {
    "AMPAddon": "amp",
    "AccelerateAddon": "accelerate",
    "ActivationOffloadAddon": "activation_offload",
    "AnomalyAddon": "anomaly",
    "AutoBatchAddon": "auto_batch",
    "CallbackAddon": "callbacks",
    "CompileAddon": "compile",
    "DeepSpeedAddon": "deepspeed",
    "EMAAddon": "ema",
    "EarlyStoppingAddon": "early_stopping",
    "FSDPAddon": "fsdp",
    "GradientAccumulationAddon": "accumulation",
    "GradientCheckpointingAddon": "gradient_checkpointing",
    "HuggingFaceAddon": "huggingface",
    "JSONLLoggerAddon": "jsonl_logger",
    "LedgerAddon": "ledger",
    "LoggerAddon": "logger",
    "MLflowLoggerAddon": "mlflow_logger",
    "MultiGPUAddon": "mpu",
    "NeptuneLoggerAddon": "neptune_logger",
    "PEFTAddon": "peft",
    "PipelineAddon": "pipeline",
    "PrefetchAddon": "prefetch",
    "ProfilerAddon": "profiler",
    "ReportAddon": "report",
    "SilentFaultGuardAddon": "silent_fault_guard",
    "SpikeGuardAddon": "spike_guard",
    "StateManagerAddon": "state_manager",
    "TensorBoardLoggerAddon": "tensorboard_logger",
    "TensorParallelAddon": "tensor_parallel",
    "ThroughputAddon": "throughput",
    "TorchMetricsAddon": "torch_metrics",
    "TrackioLoggerAddon": "trackio_logger",
    "WandBLoggerAddon": "wandb_logger",
    "WebLoggerAddon": "logger",
}


def __getattr__(name: str) -> object:
    """Import an add-on when it is first asked for."""
    if name not in _HOMES:
        raise _missing_name("zae.addons", name, __all__)
    value = globals()[name] = _load(f"zae.addons.{_HOMES[name]}", name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
