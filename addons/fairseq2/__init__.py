"""Units, data readers, gangs and the arguments of fairseq2's trainer, which train as they are."""

from zae.addons.fairseq2.reader import ReaderLoader
from zae.addons.fairseq2.regime import RegimeAddon, any_of
from zae.addons.fairseq2.trainer import ConvertedArguments, from_arguments
from zae.addons.fairseq2.unit import TrainUnitAddon, task_of

__all__ = ["ConvertedArguments", "ReaderLoader", "RegimeAddon", "TrainUnitAddon", "any_of", "from_arguments", "task_of"]
