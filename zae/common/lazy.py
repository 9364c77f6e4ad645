"""Import public names at their first use.

`import zae` runs this module, which imports only the standard library: ``python -m zae --help`` answers at once.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["load"]


def load(module: str, name: str) -> object:
    """Import a module and return one of its names."""
    try:
        return getattr(import_module(module), name)
    except ImportError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ImportError(f"cannot import {name!r}: {module} failed with {problem}", name=module) from error
