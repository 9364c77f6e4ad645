"""zae: your own PyTorch training loop, finished. See `zae.Trainer`, `zae.AddOnBase` and `zae.addons`.

``__init__.pyi`` lists the public names.
"""

from zae.lazy import load as _load
from zae.lazy import missing_name as _missing_name
from zae.lazy import names_in_stub as _names_in_stub

__version__ = "0.1.0"

_HOMES = _names_in_stub(__name__, __file__)
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: `python -m zae --help` does not wait for torch."""
    if name not in _HOMES:
        if name.endswith("Addon"):
            from zae import addons

            raise _missing_name("zae", name, addons.__all__, "zae.addons")
        raise AttributeError(f"module 'zae' has no attribute {name!r}")
    if _HOMES[name] == "zae":
        from importlib import import_module

        return import_module(f"zae.{name}")
    value = globals()[name] = _load(_HOMES[name], name)
    return value


def __dir__() -> list[str]:
    return __all__
