"""Callbacks: plain objects, those of Transformers and those of Forgather, called at the events of a run.

`Callbacks` holds them, and knows how each of their methods wants to be called. `CallbackAddon`
calls it from the hooks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from zae.addons.callbacks.trainer_state import StepLosses, TrainerControl, TrainerState
from zae.errors import CheckpointMismatch, ConfigError, did_you_mean

__all__ = ["EVENTS", "FOREIGN_EVENTS", "Callbacks"]

_log = logging.getLogger("zae")

EVENTS: dict[str, tuple[str, ...]] = {
    "on_run_begin": (),
    "on_run_end": (),
    "on_epoch_begin": (),
    "on_epoch_end": (),
    "on_step_begin": ("batch",),
    "on_step_end": ("outputs",),
    "on_validation_begin": (),
    "on_validation_end": ("metrics",),
    "on_exception": ("error",),
    "on_save": ("path",),
    "on_load": ("path",),
    "on_log": ("metrics", "step"),
}
"""The events of zae, and what each is given after the trainer."""

FOREIGN_EVENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "on_init_end",
            "on_train_begin",
            "on_train_end",
            "on_epoch_begin",
            "on_epoch_end",
            "on_step_begin",
            "on_substep_end",
            "on_pre_optimizer_step",
            "on_optimizer_step",
            "on_step_end",
            "on_save",
            "on_prediction_step",
            "on_push_begin",
        ),
        (),
    ),
    "on_evaluate": ("metrics",),
    "on_predict": ("metrics",),
    "on_log": ("logs",),
}
"""The events of Transformers, and the keywords of each beside `KEYWORDS`."""

KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""What every event of Transformers is given by keyword."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Method(NamedTuple):
    """One method of a callback."""

    callback: Any
    function: Callable[..., Any]
    keywords: frozenset[str] | None  # Those that it takes; None is all.


class Callbacks:
    """The callbacks of a trainer, in the order of their calls.

    Attributes
    ----------
    items : list
        The callbacks.
    state, control : TrainerState, TrainerControl
        What callbacks of Transformers are given.
    in_epoch : int or None
        Optimizer steps of an epoch.
    run_began, first_step, evaluation_began : float, int, float
        When and at which step the run began, and when the evaluation did.
    evaluated, evaluations, is_validating : object, list of dict, bool
        The loader of that evaluation, the records of the present validation, and whether it goes on.
    batches_in_epoch : int or None
        Batches of an epoch.
    saved_step, learning_rate : int, float
        The step that was saved last, and the rate that the last step used.
    losses : StepLosses
        The sums of the losses of steps.
    ends_epoch : bool
        Whether the loaded state is of the last step of an epoch that a callback has ended.
    is_pause : bool
        Whether a callback has stopped the run and asked for a checkpoint with it.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self.items: list[Any] = []
        self.state = TrainerState()
        self.control = TrainerControl()
        self._methods: dict[tuple[str, bool], list[_Method]] = {}
        self.args: Any = None  # Of Transformers' events, in this run.
        self.was_set_up = False
        self.ends_epoch = False
        self.is_pause = False
        self.processing_class: Any = None  # An option of the trainer, which callbacks of Transformers get.
        self.warned: set[str] = set()
        self.in_epoch: int | None = None
        self.first_step = 0
        self.run_began = 0.0
        self.evaluation_began = 0.0
        self.evaluated: Any = None
        self.evaluations: list[dict[str, Any]] = []
        self.is_validating = False
        self.batches_in_epoch: int | None = None
        self.saved_step = -1
        self.learning_rate: float | None = None
        self.losses = StepLosses()
        for callback in callbacks:
            self.add(callback)

    # ------------------------------------------------------------------------------------------- which there are

    def add(self, callback: Any) -> Any:
        """Add an instance, or one of a class; return it."""
        instance = callback() if isinstance(callback, type) else callback
        if any(item is instance for item in self.items):
            raise ConfigError(
                f"the callback {_name(instance)} is there already: it would be called twice at each event; add another "
                "instance, or leave it out"
            )
        methods = _methods_of(instance)
        self.items.append(instance)
        for event, method in methods.items():
            self._methods[event] = [*self._methods.get(event, ()), method]
        return instance

    def pop(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None where there is none."""
        is_it = isinstance(callback, type)
        matches = [item for item in self.items if (isinstance(item, callback) if is_it else item is callback)]
        if not matches:
            return None
        self.items = [item for item in self.items if item is not matches[0]]
        self._methods = {
            event: [method for method in methods if method.callback is not matches[0]]
            for event, methods in self._methods.items()
        }
        return matches[0]

    def wants(self, event: str, is_foreign: bool = True) -> bool:
        """Return whether a callback has a method for an event."""
        return bool(self._methods.get((event, is_foreign)))

    # ------------------------------------------------------------------------------------------------- the calls

    def call(self, event: str, *args: Any) -> None:
        """Call an event of zae: each method gets ``args``, of which the first is the trainer."""
        for method in self._methods.get((event, False), ()):
            with _noting(method, event):
                method.function(*args)

    def call_foreign(self, event: str, args: Any, keywords: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Call an event of Transformers; return the flags that were set, with the callback that has set each."""
        requests = []
        for method in self._methods.get((event, True), ()):
            before = set(self.control.flags())
            arguments = keywords if method.keywords is None else {key: keywords[key] for key in method.keywords}
            with _noting(method, event):
                returned = method.function(args, self.state, self.control, **arguments)
            if returned is not None:
                self.control = _control_of(returned)
            requests += [(flag, _name(method.callback)) for flag in self.control.flags() if flag not in before]
        return requests

    # ------------------------------------------------------------------------------------------------- the state

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the states of the callbacks that have one, by the names of their classes."""
        states: dict[str, list[Any]] = {}
        for item in self.items:
            state = _read(item)
            if state is not None:
                states.setdefault(_name(item), []).append(state)
        return states

    def check(self, states: Any) -> None:
        """Refuse what `state_dict` has not returned, and warn of callbacks that are not here."""
        if not isinstance(states, Mapping) or not all(isinstance(state, (list, tuple)) for state in states.values()):
            raise CheckpointMismatch("the state of CallbackAddon does not contain the states of callbacks by name")
        present = self.state_dict()
        for name, saved in states.items():
            if len(saved) > len(present.get(name, ())):
                _log.warning(
                    "the state contains %d callback(s) %s and there are %d here: what is left over is not loaded",
                    len(saved),
                    name,
                    len(present.get(name, ())),
                )

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the state of each callback that has one saved."""
        remaining = {name: list(state) for name, state in states.items()}
        for item in self.items:
            if _read(item) is not None and remaining.get(_name(item)):
                _load(item, remaining[_name(item)].pop(0))


def _name(callback: Any) -> str:
    return type(callback).__name__


def _methods_of(callback: Any) -> dict[tuple[str, bool], _Method]:
    """Return the methods of a callback by event and by whether they are called as Transformers does."""
    base = next((cls for cls in type(callback).__mro__ if cls.__name__ == "TrainerCallback"), None)
    if any(cls.__name__ == "Callback" and "lightning" in cls.__module__ for cls in type(callback).__mro__):
        raise ConfigError(
            f"{_name(callback)} is a callback of Lightning, which are not called here; write an object with methods "
            "such as on_epoch_end(self, trainer), or add EarlyStoppingAddon, EMAAddon or StateManagerAddon"
        )
    methods = {}
    for name in dir(callback):
        if not name.startswith("on_") or not callable(function := getattr(callback, name)):
            continue
        if base is not None and getattr(type(callback), name, None) is getattr(base, name, ()):
            continue  # It does nothing.
        if name not in EVENTS and name not in FOREIGN_EVENTS:
            raise ConfigError(
                f"{_name(callback)}.{name} would never be called: there is no such event"
                f"{did_you_mean(name, {**EVENTS, **FOREIGN_EVENTS})}. The events are {', '.join(EVENTS)}, and, with "
                f"(args, state, control, **kwargs), {', '.join(FOREIGN_EVENTS)}; begin the name of a helper with _"
            )
        is_foreign, keywords = _read_signature(callback, name, function, base is not None)
        methods[name, is_foreign] = _Method(callback, function, keywords)
    if not methods and base is None:
        raise ConfigError(
            f"callbacks has {callback!r:.80}, a {_name(callback)} without a method named as an event; write an object "
            "with methods such as on_epoch_end(self, trainer), or a transformers.TrainerCallback"
        )
    return methods


def _read_signature(
    callback: Any, event: str, function: Callable[..., Any], is_foreign: bool
) -> tuple[bool, frozenset[str] | None]:
    """Return whether a method is called as Transformers does, and the keywords that it takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Written in C, for instance.
        return is_foreign or event not in EVENTS, None
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    is_foreign |= {"state", "control"} <= set(signature.parameters) or event not in EVENTS
    is_foreign |= (
        takes_all
        and event in FOREIGN_EVENTS
        and (
            inspect.Parameter.VAR_POSITIONAL in kinds
            or sum(parameter.kind in _POSITIONAL for parameter in parameters) == 3
        )
    )
    arguments = (*KEYWORDS, *FOREIGN_EVENTS[event]) if is_foreign else ()
    taken = None if takes_all else frozenset(name for name in arguments if name in signature.parameters)
    positional = ("args", "state", "control") if is_foreign else ("trainer", *EVENTS[event])
    try:
        signature.bind(*positional, **dict.fromkeys(arguments if taken is None else taken))
    except TypeError as error:
        ways = [f"(self, {', '.join(('trainer', *EVENTS[event]))})"] if event in EVENTS else []
        ways += ["(self, args, state, control, **kwargs)"] if event in FOREIGN_EVENTS else []
        keywords = f"; the keywords are {', '.join(arguments)}" if arguments else ""
        raise ConfigError(
            f"{_name(callback)}.{event}{signature} cannot be called ({error}); write def {event}"
            f"{f' or def {event}'.join(ways)}{keywords}"
        ) from None
    return is_foreign, taken


@contextmanager
def _noting(method: _Method, event: str) -> Iterator[None]:
    """Note on an exception the callback and the event that raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"zae: raised by the callback {_name(method.callback)}, in {event}")
        raise


def _control_of(returned: Any) -> TrainerControl:
    """Return the control that a callback returned; that of Transformers has the same flags."""
    if isinstance(returned, TrainerControl):
        return returned
    return TrainerControl(**{name: bool(getattr(returned, name)) for name in vars(TrainerControl())})


# --------------------------------------------------------------------------------------- the state of one callback


def _read(callback: Any) -> Any:
    """Return the state of a callback; None where it keeps none."""
    if callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None)):
        return callback.state_dict()
    if names := getattr(callback, "state_attributes", ()):
        return {name: getattr(callback, name) for name in names}
    if callable(getattr(callback, "from_state", None)) and callable(getattr(callback, "state", None)):
        return dict(callback.state().get("attributes", {}))  # The arguments are those of the script.
    return None


def _load(callback: Any, state: Any) -> None:
    """Load the state of a callback."""
    if callable(getattr(callback, "load_state_dict", None)) and callable(getattr(callback, "state_dict", None)):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)
