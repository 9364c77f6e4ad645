"""The add-ons that come with zae; a package that one of them needs is imported when a trainer is set up.

``__init__.pyi`` lists them. A module is imported when its add-on is first asked for.
"""

from zae.lazy import load as _load
from zae.lazy import missing_name as _missing_name
from zae.lazy import names_in_stub as _names_in_stub

if __name__ != "zae.addons":  # The root of a checkout is on sys.path: a second copy of each class would come from here.
    raise ImportError(f"this is the package zae.addons, not {__name__}; write: from zae.addons import AMPAddon")

_HOMES = _names_in_stub(__name__, __file__)
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import an add-on when it is first asked for."""
    if name not in _HOMES:
        raise _missing_name("zae.addons", name, __all__)
    value = globals()[name] = _load(_HOMES[name], name)
    return value


def __dir__() -> list[str]:
    return __all__
