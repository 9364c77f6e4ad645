"""The public names of zae: the one list of them, for type checkers and for ``__init__.py``."""

from zae import schedulers as schedulers
from zae.addon import AddOnBase as AddOnBase
from zae.addon import Description as Description
from zae.addon import hook as hook
from zae.addon import repeats as repeats
from zae.addon import replaces as replaces
from zae.errors import AddOnConflict as AddOnConflict
from zae.errors import AddOnError as AddOnError
from zae.errors import AddOnOrder as AddOnOrder
from zae.errors import AddOnRequirement as AddOnRequirement
from zae.errors import CheckpointDamaged as CheckpointDamaged
from zae.errors import CheckpointError as CheckpointError
from zae.errors import CheckpointMismatch as CheckpointMismatch
from zae.errors import CheckpointNotFound as CheckpointNotFound
from zae.errors import ConfigError as ConfigError
from zae.errors import DistributedError as DistributedError
from zae.errors import LoaderError as LoaderError
from zae.errors import LoggerError as LoggerError
from zae.errors import MissingError as MissingError
from zae.errors import MonitorError as MonitorError
from zae.errors import NonFiniteError as NonFiniteError
from zae.errors import OptionError as OptionError
from zae.errors import StepError as StepError
from zae.errors import TaskError as TaskError
from zae.errors import ZaeError as ZaeError
from zae.loop.cadence import Every as Every
from zae.loop.metric_rows import MetricsDict as MetricsDict
from zae.loop.progress import ProgressChecker as ProgressChecker
from zae.trainer import Trainer as Trainer
from zae.tuning.batch_size import find_batch_size as find_batch_size
from zae.tuning.learning_rate import find_lr as find_lr

__version__: str
