"""Every error that zae raises on purpose.

The tree, with the built-in family each one also belongs to, so that an
``except ValueError`` written before zae keeps working::

    ZaeError (Exception)
    |-- OptionError (TypeError)            an unknown argument, or one that is missing
    |-- MissingError (AttributeError)      a name of another trainer, or of an add-on that is not there
    |-- ConfigError (ValueError)           an argument with an invalid value
    |-- StepError (TypeError, ValueError)  what train_step or test_step returned
    |-- LoaderError (ValueError)           a loader, or what it yielded
    |-- MonitorError (KeyError, ValueError)  the name of a metric that is not recorded
    |-- NonFiniteError (ArithmeticError)   a loss or a gradient that is NaN or infinite
    |-- TaskError (TypeError)              a trainer class that cannot work
    |   `-- AddOnError                     an add-on, or a composed class, that cannot work
    |       |-- AddOnConflict              two add-ons that exclude each other
    |       |-- AddOnRequirement           an add-on that needs another one, or a package
    |       `-- AddOnOrder                 relations that cannot be ordered
    |-- CheckpointError (ValueError)       a state that was not loaded, or not saved
    |   |-- CheckpointNotFound (FileNotFoundError)
    |   |-- CheckpointDamaged              a file is missing, truncated, changed or hostile
    |   `-- CheckpointMismatch             a whole state, of another model or composition
    |-- LoggerError (RuntimeError)         a logger that was required, and failed
    `-- DistributedError (RuntimeError)    ranks that failed, died or disagree

Every message says what was wrong, where, what was found, and what to write instead.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

__all__ = [
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
    "LoaderError",
    "LoggerError",
    "MissingError",
    "MonitorError",
    "NonFiniteError",
    "OptionError",
    "StepError",
    "TaskError",
    "ZaeError",
]


class ZaeError(Exception):
    """Base of every error that zae raises on purpose.

    Control characters in the text, in a name of a checkpoint for instance, are escaped. ``from_rank`` is the rank that
    has failed, where another rank raises this because of it.
    """

    from_rank: int | None = None

    def __str__(self) -> str:
        # Not super(): KeyError shows the repr of its argument, with "\n" as two characters.
        return printable(Exception.__str__(self))


class OptionError(ZaeError, TypeError):
    """An unknown argument, or one that is missing."""


class MissingError(ZaeError, AttributeError):
    """A trainer does not have a method or an attribute of another trainer, or of an add-on that is not there."""


class ConfigError(ZaeError, ValueError):
    """An argument with an invalid value."""


class StepError(ZaeError, TypeError, ValueError):
    """What ``train_step`` or ``test_step`` returned cannot be used."""


class LoaderError(ZaeError, ValueError):
    """A loader without batches, or with other batches than expected."""


class MonitorError(ZaeError, KeyError, ValueError):
    """A metric is asked for by a name that nothing records."""


class NonFiniteError(ZaeError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class TaskError(ZaeError, TypeError):
    """A trainer class cannot work as it is written."""


class AddOnError(TaskError):
    """An add-on cannot work as it is written, or a class cannot be made of these add-ons."""


class AddOnConflict(AddOnError):
    """Two add-ons exclude each other."""


class AddOnRequirement(AddOnError):
    """An add-on needs another add-on, or a package that is not installed."""


class AddOnOrder(AddOnError):
    """The relations between add-ons contradict each other, or a hand-written order breaks them."""


class CheckpointError(ZaeError, ValueError):
    """A state was not loaded, or not saved; ``errno`` is the system's number where a disk has refused."""

    errno: int | None = None


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the place asked for."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is absent, cut short, changed or hostile."""


class CheckpointMismatch(CheckpointError):
    """A whole checkpoint, but of another model, optimizer or composition."""


class LoggerError(ZaeError, RuntimeError):
    """A logger that was required has failed."""


class DistributedError(ZaeError, RuntimeError):
    """Ranks failed, died or disagree."""


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text with its control characters escaped, except those of ``kept``."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_one_letter_off(name: str, known: str) -> bool:
    """Return whether a name has one letter more, less or other than a known one, or two that changed places."""
    if name == known or abs(len(name) - len(known)) > 1:
        return False
    at = next((i for i, (a, b) in enumerate(zip(name, known)) if a != b), min(len(name), len(known)))
    if len(name) == len(known):
        changed_places = name[at : at + 2] == known[at : at + 2][::-1] and name[at + 2 :] == known[at + 2 :]
        return changed_places or name[at + 1 :] == known[at + 1 :]
    longer, shorter = sorted((name, known), key=len, reverse=True)
    return longer[at + 1 :] == shorter[at:]


def kind_of(value: object) -> str:
    """Return ``"None"``, or the type of a value with its article."""
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0] in 'AEIOUaeiou')} {name}"


def exit_status(number: int) -> int:
    """Return the exit status of a process that saved its state after a signal; all but SIGHUP have that of SIGTERM."""
    return 128 + (number if number == getattr(signal, "SIGHUP", None) else signal.SIGTERM)
