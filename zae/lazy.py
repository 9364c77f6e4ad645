"""Public names that are imported when they are first asked for."""

from __future__ import annotations

from importlib import import_module

__all__ = ["load"]


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
    >>> load("zae.progress", "Every").__name__
    'Every'
    """
    try:
        return getattr(import_module(module), name)
    except ImportError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ImportError(f"cannot import {name!r}: {module} failed with {problem}", name=module) from error
