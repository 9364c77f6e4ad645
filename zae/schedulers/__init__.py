"""Learning-rate schedules that are functions of the step, and what a trainer needs to know about any scheduler.

`cosine`, `linear`, `inverse_sqrt` and `wsd` begin with a warm-up and are as long as the run:
``scheduler=zae.schedulers.cosine(warmup=0.05)`` is all that a trainer needs. The classes are to be stepped in any loop.

Each of them computes the rate from the number of steps alone, never from the previous rate. So a resumed schedule is
bitwise the same as an uninterrupted one, and a chain is only its parts, each with its own steps.
"""

from importlib import import_module as _import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zae.schedulers.lengths import is_plateau, own_length, planned_length, steps_taken
    from zae.schedulers.ramps import CosineAnnealingScheduler, SchedulerBase, SchedulerChain, WarmUpScheduler
    from zae.schedulers.warmup import cosine, inverse_sqrt, linear, wsd

__all__ = [
    "CosineAnnealingScheduler",
    "SchedulerBase",
    "SchedulerChain",
    "WarmUpScheduler",
    "cosine",
    "inverse_sqrt",
    "is_plateau",
    "linear",
    "own_length",
    "planned_length",
    "steps_taken",
    "wsd",
]

_HOMES = {
    "zae.schedulers.lengths": ("is_plateau", "own_length", "planned_length", "steps_taken"),
    "zae.schedulers.warmup": ("cosine", "inverse_sqrt", "linear", "wsd"),
}  # All others are of ramps.


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: a trainer needs only what is in ``lengths``."""
    if name not in __all__:
        raise AttributeError(f"module 'zae.schedulers' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "zae.schedulers.ramps")
    value: object = getattr(_import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
