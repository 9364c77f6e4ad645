"""The add-ons that come with zae; a package that one of them needs is imported when a trainer is set up."""

from typing import TYPE_CHECKING

from zae.common.lazy import load as _load
from zae.common.lazy import missing_name as _missing_name

if TYPE_CHECKING:
    from zae.addons.accelerate.addon import AccelerateAddon
    from zae.addons.accumulation import GradientAccumulationAddon
    from zae.addons.activation_offload.addon import ActivationOffloadAddon
    from zae.addons.amp import AMPAddon
    from zae.addons.anomaly import AnomalyAddon
    from zae.addons.auto_batch.addon import AutoBatchAddon
    from zae.addons.callbacks.addon import CallbackAddon
    from zae.addons.compile import CompileAddon
    from zae.addons.deepspeed.addon import DeepSpeedAddon
    from zae.addons.early_stopping import EarlyStoppingAddon
    from zae.addons.ema import EMAAddon
    from zae.addons.fsdp.addon import FSDPAddon
    from zae.addons.gradient_checkpointing.addon import GradientCheckpointingAddon
    from zae.addons.huggingface.addon import HuggingFaceAddon
    from zae.addons.ledger.addon import LedgerAddon
    from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon
    from zae.addons.loggers.logger import LoggerAddon, WebLoggerAddon
    from zae.addons.loggers.mlflow_logger import MLflowLoggerAddon
    from zae.addons.loggers.neptune_logger import NeptuneLoggerAddon
    from zae.addons.loggers.tensorboard_logger import TensorBoardLoggerAddon
    from zae.addons.loggers.trackio_logger import TrackioLoggerAddon
    from zae.addons.loggers.wandb_logger import WandBLoggerAddon
    from zae.addons.mpu import MultiGPUAddon
    from zae.addons.peft.addon import PEFTAddon
    from zae.addons.pipeline.addon import PipelineAddon
    from zae.addons.prefetch import PrefetchAddon
    from zae.addons.profiler import ProfilerAddon
    from zae.addons.report import ReportAddon
    from zae.addons.silent_fault_guard.addon import SilentFaultGuardAddon
    from zae.addons.spike_guard import SpikeGuardAddon
    from zae.addons.state_manager.addon import StateManagerAddon
    from zae.addons.tensor_parallel import TensorParallelAddon
    from zae.addons.throughput import ThroughputAddon
    from zae.addons.torch_metrics.addon import TorchMetricsAddon

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
    "AccelerateAddon": "accelerate.addon",
    "ActivationOffloadAddon": "activation_offload.addon",
    "AnomalyAddon": "anomaly",
    "AutoBatchAddon": "auto_batch.addon",
    "CallbackAddon": "callbacks.addon",
    "CompileAddon": "compile",
    "DeepSpeedAddon": "deepspeed.addon",
    "EMAAddon": "ema",
    "EarlyStoppingAddon": "early_stopping",
    "FSDPAddon": "fsdp.addon",
    "GradientAccumulationAddon": "accumulation",
    "GradientCheckpointingAddon": "gradient_checkpointing.addon",
    "HuggingFaceAddon": "huggingface.addon",
    "JSONLLoggerAddon": "loggers.jsonl_logger",
    "LedgerAddon": "ledger.addon",
    "LoggerAddon": "loggers.logger",
    "MLflowLoggerAddon": "loggers.mlflow_logger",
    "MultiGPUAddon": "mpu",
    "NeptuneLoggerAddon": "loggers.neptune_logger",
    "PEFTAddon": "peft.addon",
    "PipelineAddon": "pipeline.addon",
    "PrefetchAddon": "prefetch",
    "ProfilerAddon": "profiler",
    "ReportAddon": "report",
    "SilentFaultGuardAddon": "silent_fault_guard.addon",
    "SpikeGuardAddon": "spike_guard",
    "StateManagerAddon": "state_manager.addon",
    "TensorBoardLoggerAddon": "loggers.tensorboard_logger",
    "TensorParallelAddon": "tensor_parallel",
    "ThroughputAddon": "throughput",
    "TorchMetricsAddon": "torch_metrics.addon",
    "TrackioLoggerAddon": "loggers.trackio_logger",
    "WandBLoggerAddon": "loggers.wandb_logger",
    "WebLoggerAddon": "loggers.logger",
}


def __getattr__(name: str) -> object:
    """Import an add-on when it is first asked for."""
    if name not in _HOMES:
        raise _missing_name("zae.addons", name, __all__)
    value = globals()[name] = _load(f"zae.addons.{_HOMES[name]}", name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
