"""Public names that are imported when they are first asked for."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["keep_old_names", "load"]


def load(module: str, name: str) -> object:
    """Return a name of a module, which is imported if it was not.

    Parameters
    ----------
    module : str
        The module that defines the name.
    name : str
        A name that the module has.

    Returns
    -------
    object
        The class or function.

    Raises
    ------
    ImportError
        If the module cannot be imported. Where something else than an import failed in it, that error is the cause:
        Python reports an AttributeError from a module's ``__getattr__`` as a missing name, and drops it.

    Examples
    --------
    >>> load("zae.loop.progress", "Every").__name__
    'Every'
    """
    try:
        return getattr(import_module(module), name)
    except ImportError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ImportError(f"cannot import {name!r}: {module} failed with {problem}", name=module) from error


class _OldNames:
    """Finds modules by the names that they had before they were put into packages."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that has moved; Python asks here after every other place."""
        if not name.startswith("zae."):
            return None
        from zae.common.moved import spec_of

        return spec_of(name)


def keep_old_names() -> None:
    """Let modules be imported by their old names, with a warning (`zae.common.moved`)."""
    sys.meta_path.append(_OldNames)
