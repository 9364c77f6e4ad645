"""zae: your own PyTorch training loop, finished. See `zae.Trainer`, `zae.AddOnBase` and `zae.addons`."""

from zae.common.lazy import load as _load
from zae.common.lazy import missing_name as _missing_name

TYPE_CHECKING = False  # For type checkers; to import typing would take most of the time.
if TYPE_CHECKING:
    from zae import schedulers as schedulers
    from zae.addon import AddOnBase, hook, repeats, replaces
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
        LoggerError,
        MissingError,
        MonitorError,
        NonFiniteError,
        OptionError,
        SilentFaultError,
        StepError,
        TaskError,
        ZaeError,
    )
    from zae.loop.history import MetricsDict
    from zae.loop.progress import Every, ProgressChecker
    from zae.trainer import Trainer
    from zae.tuning.batch_size import find_batch_size
    from zae.tuning.learning_rate import find_lr
    from zae.tuning.model_summary import summary

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
    "LoggerError",
    "MetricsDict",
    "MissingError",
    "MonitorError",
    "NonFiniteError",
    "OptionError",
    "ProgressChecker",
    "SilentFaultError",
    "StepError",
    "TaskError",
    "Trainer",
    "ZaeError",
    "__version__",
    "find_batch_size",
    "find_lr",
    "hook",
    "repeats",
    "replaces",
    "schedulers",
    "summary",
]

_HOMES = {
    "zae.addon": ("AddOnBase", "repeats", "replaces", "hook"),
    "zae.loop.progress": ("Every", "ProgressChecker"),
    "zae.loop.history": ("MetricsDict",),
    "zae.trainer": ("Trainer",),
    "zae.tuning.batch_size": ("find_batch_size",),
    "zae.tuning.learning_rate": ("find_lr",),
    "zae.tuning.model_summary": ("summary",),
}  # All others are errors.


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: `python -m zae --help` does not wait for torch."""
    if name not in __all__:
        if name.endswith("Addon"):
            from zae import addons

            raise _missing_name("zae", name, addons.__all__, "zae.addons")
        raise AttributeError(f"module 'zae' has no attribute {name!r}")
    if name == "schedulers":
        from importlib import import_module

        return import_module("zae.schedulers")
    home = next((module for module, names in _HOMES.items() if name in names), "zae.errors")
    value = globals()[name] = _load(home, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
