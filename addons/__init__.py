"""The add-ons that come with zae; a package that one of them needs is imported when a trainer is set up."""

from zae.addons.accumulation import GradientAccumulationAddon
from zae.addons.amp import AMPAddon
from zae.addons.early_stopping import EarlyStoppingAddon
from zae.addons.ema import EMAAddon
from zae.addons.ledger import LedgerAddon
from zae.addons.mpu import MultiGPUAddon
from zae.addons.state_manager import StateManagerAddon

__all__ = [
    "AMPAddon",
    "EMAAddon",
    "EarlyStoppingAddon",
    "GradientAccumulationAddon",
    "LedgerAddon",
    "MultiGPUAddon",
    "StateManagerAddon",
]
