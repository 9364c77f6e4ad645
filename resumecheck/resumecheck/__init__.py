"""Does a training script resume to the same steps after a kill?

``resumecheck -- python train.py`` says it, and where it does not, at which step, why, and what to write.
"""

from .check import Options, Result, check
from .errors import Refused

__all__ = ["Options", "Refused", "Result", "__version__", "check"]

__version__ = "0.1.0"
