"""The add-ons that come with zae; a package that one of them needs is imported when a trainer is set up."""

from zae.addons.accumulation import GradientAccumulationAddon
from zae.addons.amp import AMPAddon
from zae.addons.early_stopping import EarlyStoppingAddon
from zae.addons.ema import EMAAddon
from zae.addons.jsonl_logger import JSONLLoggerAddon
from zae.addons.ledger import LedgerAddon
from zae.addons.logger import LoggerAddon, WebLoggerAddon
from zae.addons.mpu import MultiGPUAddon
from zae.addons.neptune_logger import NeptuneLoggerAddon
from zae.addons.state_manager import StateManagerAddon
from zae.addons.tensorboard_logger import TensorBoardLoggerAddon
from zae.addons.wandb_logger import WandBLoggerAddon

__all__ = [
    "AMPAddon",
    "EMAAddon",
    "EarlyStoppingAddon",
    "GradientAccumulationAddon",
    "JSONLLoggerAddon",
    "LedgerAddon",
    "LoggerAddon",
    "MultiGPUAddon",
    "NeptuneLoggerAddon",
    "StateManagerAddon",
    "TensorBoardLoggerAddon",
    "WandBLoggerAddon",
    "WebLoggerAddon",
]
