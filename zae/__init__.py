"""zae: your own PyTorch training loop, finished. See `zae.Trainer`, `zae.AddOnBase` and `zae.addons`."""

from zae.addon import AddOnBase, replaces, seam
from zae.errors import (
    AddOnConflict,
    AddOnError,
    AddOnOrder,
    AddOnRequirement,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    DistributedError,
    LoaderError,
    MonitorError,
    NonFiniteError,
    OptionError,
    StepError,
    ZaeError,
)
from zae.progress import Every, ProgressChecker
from zae.records import MetricsDict
from zae.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AddOnBase",
    "AddOnConflict",
    "AddOnError",
    "AddOnOrder",
    "AddOnRequirement",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ConfigError",
    "DistributedError",
    "Every",
    "LoaderError",
    "MetricsDict",
    "MonitorError",
    "NonFiniteError",
    "OptionError",
    "ProgressChecker",
    "StepError",
    "Trainer",
    "ZaeError",
    "__version__",
    "replaces",
    "seam",
]
