"""See in the first call of each hook that an override reaches what is inside of it, and returns what the loop needs.

Whether a method calls ``super()`` cannot be read from its code: it may do so in a helper, or in a branch that never
runs. So the first call in a process is watched, by a profile function of this thread, and nothing afterwards.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from zae.compose.class_checks import error_for
from zae.compose.introspect import function_of, hooks_of, is_add_on, is_base, is_marked, mentions_super, wrappers_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["check_properties", "watching_first_calls", "without_first_calls"]

_RETURN_ARGUMENT = ("to_device", "wrap_model", "wrap_loader")  # Their type is Any, and they return what they are given.
_MAY_RETURN_NONE = ("metric_on_epoch_end",)  # None is no metrics.

_FINAL_HOOKS = ("teardown", "on_exception")
"""The hooks whose skipped work is done all the same: the process is left as it was, and a user's error goes on."""

_STATE_HOOKS = ("state_dict", "load_state_dict")  # AddOnBase does it for what add-ons declare.
_LOOP_HOOKS = ("setup", *_STATE_HOOKS)  # No task can do the work of their defaults.
_END = object()  # Of an iterator.
_overridden: WeakKeyDictionary[type, list[tuple[str, Any]]] = WeakKeyDictionary()  # The hooks of each class.
_judged: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()  # Those whose first call is over.


@contextmanager
def watching_first_calls(trainer: Trainer) -> Iterator[None]:
    """Put a `FirstCall` before each overridden hook of a trainer, unless this process has called it already."""
    attributes = vars(trainer)
    calls = {}
    for name, introduced in _hooks_to_judge(type(trainer)):
        if name not in attributes and not isinstance(vars(introduced)[name], property):
            calls[name] = FirstCall(trainer, name)
    attributes |= calls
    try:
        yield
    finally:  # They hold the trainer, whose memory is to be freed with its last user.
        for name, call in calls.items():
            if attributes.get(name) is call:
                del attributes[name]


def without_first_calls(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a trainer as its class and its user have set them."""
    return {name: value for name, value in attributes.items() if not isinstance(value, FirstCall)}


def check_properties(trainer: Trainer) -> None:
    """Read each hook that is a property, which no attribute of an object can stand before."""
    for name, introduced in _hooks_to_judge(type(trainer)):
        if isinstance(vars(introduced)[name], property):
            FirstCall(trainer, name).read()


def _hooks_to_judge(cls: Any) -> list[tuple[str, Any]]:
    """Return the overridden hooks of a class whose first call was not judged, with the class that introduced each."""
    if cls not in _overridden:
        _judged[cls] = set()
        _overridden[cls] = [
            (name, introduced)
            for name, introduced in hooks_of(cls).items()
            if next(c for c in cls.__mro__ if name in vars(c)) is not introduced
        ]
    judged = _judged[cls]
    return [pair for pair in _overridden[cls] if pair[0] not in judged]


class FirstCall:
    """A hook of a trainer until it is called in a run: an attribute that takes itself away, and watches the call.

    An override that skips what an add-on does there is refused, and so is an add-on's that mentions no ``super()``. One
    that mentions it may do the work of the loop itself in some cases, where no other add-on is skipped; a task may do
    so anyway. Nothing is judged where a profile function is set already, and where the call raises.

    One call is enough, as an override calls ``super()`` in each. An add-on that acts in every tenth step calls it
    before it looks at the step, else those inside of it miss nine of ten. What is to be left out now and then has a
    hook that decides it: ``should_step``, ``should_validate``, ``should_checkpoint``. An override that calls
    ``super()`` in some calls only, and means it, is marked ``@replaces``.

    What a context manager or an iterator does may begin when it is entered, or asked for its first element: it is
    judged then.
    """

    __slots__ = ("_name", "_trainer")

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer = trainer
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook of the class, and judge it."""
        attributes = vars(self._trainer)
        if attributes.get(self._name) is self:
            del attributes[self._name]
        method = _method_of(self._trainer, self._name)
        watch = _Watch(self._trainer, self._name)
        with watch:
            result = method(*args, **kwargs)
        if result is None and _needs_value(type(self._trainer), self._name, args):
            self._refuse_none()
        if not watch.has_reached_all and isinstance(result, AbstractContextManager):
            return self._enter(result, watch)
        if not watch.has_reached_all and isinstance(result, Iterator):
            return self._iterate(result, watch)
        self._judge(watch, *args)
        return result

    def __reduce__(self) -> Any:
        """Return what makes it in a copy: the method."""
        return (getattr, (self._trainer, self._name))

    def read(self) -> None:
        """Judge a property; one that is true by itself need not ask those inside of it."""
        watch = _Watch(self._trainer, self._name)
        with watch:
            value = getattr(self._trainer, self._name)
        if not value:
            self._judge(watch)

    @contextmanager
    def _enter(self, context: AbstractContextManager[Any], watch: _Watch) -> Iterator[Any]:
        with ExitStack() as stack:
            with watch:
                value = stack.enter_context(context)
            self._judge(watch)
            yield value

    def _iterate(self, iterator: Iterator[Any], watch: _Watch) -> Iterator[Any]:
        with watch:
            first = next(iterator, _END)
        self._judge(watch)
        if first is not _END:
            yield first
            yield from iterator

    def _judge(self, watch: _Watch, *args: Any) -> None:
        """Refuse an override that has not reached what is inside of it."""
        if not watch.is_sure:
            return
        klass, *skipped = watch.unreached
        add_ons = [base for base in skipped if is_add_on(base)]
        does_default = mentions_super(vars(klass)[self._name])
        if self._name not in _LOOP_HOOKS:
            does_default = does_default or not is_add_on(klass)
        if not skipped or (does_default and not add_ons):
            _judged.setdefault(type(self._trainer), set()).add(self._name)
            return
        text = self._describe(klass, add_ons)
        error = None
        if self._name in _FINAL_HOOKS:
            getattr(super(klass, self._trainer), self._name)(*args)
            error = sys.exc_info()[1]
        if error is None:
            raise error_for(klass)(text)
        error.add_note(f"zae: {text}")

    def _describe(self, klass: Any, add_ons: Sequence[Any]) -> str:
        """Say what an override skips, of these add-ons, and what to write."""
        skipped = [add_on for add_on in add_ons if not is_base(add_on)]
        if self._name in _STATE_HOOKS and len(skipped) < len(add_ons):
            skipped += [c for c in type(self._trainer).__mro__ if is_add_on(c) and _declares_state(c)]
        names = dict.fromkeys(base.__name__ for base in skipped)
        left_out = "the add-ons inside it and the default"
        if names:
            left_out = f"what {', '.join(names)} {'do' if len(names) > 1 else 'does'} there"
        value = vars(klass)[self._name]
        arguments = "" if isinstance(value, property) else "(...)"
        text = (
            f"{klass.__name__}.{self._name} overrides a hook without calling super(), and so skips {left_out}; call "
            f"super().{self._name}{arguments}, or mark the method with @zae.replaces if it replaces them on purpose"
        )
        if mentions_super(value):
            text += ". It may be there, and was not reached in the first call: let no condition stand before it"
        return text

    def _refuse_none(self) -> None:
        """Refuse an override that has returned nothing where the loop needs a value."""
        cls = type(self._trainer)
        owners = [c for c in cls.__mro__ if self._name in vars(c) and c is not hooks_of(cls)[self._name]]
        klass, *others = [owner for owner in owners if not is_base(owner)]
        names = [other.__name__ for other in others]
        passes_on = f" (or {' or '.join(names)} inside of it)" if names else ""
        raise error_for(klass)(
            f"{klass.__name__}.{self._name}{passes_on} returned None, and the loop needs its return value; write "
            f"return super().{self._name}(...), or store it and return it at the end"
        )


class _Watch:
    """The classes whose methods of one name are called with one trainer within the block, outermost first."""

    def __init__(self, trainer: Any, name: str) -> None:
        self.trainer = trainer
        self.is_sure = True
        cls = type(trainer)
        self._owners = [*_owners_to_reach(cls, name)]
        self._functions = [_functions_of(vars(owner)[name]) for owner in self._owners]
        self._count = 1  # The outermost one is called by the loop.
        self._outer: _Watch | None = None

    @property
    def unreached(self) -> list[Any]:
        """The innermost class that was reached, and those inside of it."""
        return self._owners[self._count - 1 :]

    @property
    def has_reached_all(self) -> bool:
        """Whether nothing is left to be seen."""
        return self._count == len(self._owners)

    def __enter__(self) -> None:
        if self.has_reached_all:
            return
        present = sys.getprofile()
        if present is not None and not isinstance(present, _Watch):
            self.is_sure = False
            return
        self._outer = present  # A hook that is called within another one.
        sys.setprofile(self)

    def __exit__(self, *exception: object) -> None:
        if sys.getprofile() is self:
            sys.setprofile(self._first_open(self._outer))
        elif not self.has_reached_all:  # The method has set one of its own.
            self.is_sure = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; Python calls it for each event of this thread."""
        if event != "call":
            return
        watch: _Watch | None = self
        while watch is not None:
            watch._note(frame)
            watch = watch._outer
        if self.has_reached_all:  # The rest of the method is not slowed down.
            sys.setprofile(self._first_open(self))

    def _note(self, frame: FrameType) -> None:
        if self.has_reached_all:
            return
        for function in self._functions[self._count]:
            if frame.f_code is function.__code__ and _is_call_of(function, frame, self.trainer):
                self._count += 1
                return

    @staticmethod
    def _first_open(watch: _Watch | None) -> _Watch | None:
        while watch is not None and watch.has_reached_all:
            watch = watch._outer
        return watch


def _declares_state(add_on: Any) -> bool:
    body = vars(add_on)
    return bool(body.get("state_attributes") or body.get("rank_state_attributes"))


def _owners_to_reach(cls: Any, name: str) -> Iterator[Any]:
    """Yield the classes that a hook's overrides are to reach, outermost first: up to one that does the whole work."""
    introduced = hooks_of(cls)[name]
    for klass in cls.__mro__[: cls.__mro__.index(introduced) + 1]:
        if name in vars(klass):
            value = vars(klass)[name]
            if not _functions_of(value):  # A callable object, whose call no profile function sees.
                return
            yield klass
            if is_marked(value, "__replaces__"):
                return


def _functions_of(value: Any) -> list[FunctionType]:
    """Return the function of a method, and those around it."""
    return [wrapper for wrapper in wrappers_of(value) if isinstance(wrapper, FunctionType)]


def _is_call_of(function: FunctionType, frame: FrameType, trainer: Any) -> bool:
    """Return whether a frame is that of a function and a trainer: what a decorator makes has one code for many."""
    code = frame.f_code
    values = frame.f_locals
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name in values and values[name] is not cell.cell_contents:
            return False
    objects: Sequence[Any] = ()  # A static method has none.
    if code.co_argcount:
        objects = (values[code.co_varnames[0]],)
    elif code.co_flags & inspect.CO_VARARGS:
        objects = values[code.co_varnames[code.co_kwonlyargcount]][:1]
    return not objects or objects[0] is trainer or objects[0] is type(trainer)


def _method_of(trainer: Any, name: str) -> Any:
    """Return a method of the class of a trainer, bound to it, whatever attribute of the trainer stands before it."""
    value = next(vars(cls)[name] for cls in type(trainer).__mro__ if name in vars(cls))
    return value.__get__(trainer, type(trainer)) if hasattr(value, "__get__") else value


def _needs_value(cls: type, name: str, args: Sequence[Any]) -> bool:
    """Return whether the loop needs what a hook returns."""
    if name in _RETURN_ARGUMENT:
        return args[0] is not None
    default: Callable[..., Any] = function_of(vars(hooks_of(cls)[name])[name])
    returned = str(default.__annotations__.get("return"))
    may_be_none = returned in ("None", "Any") or returned.endswith("| None")
    return not may_be_none and name not in _MAY_RETURN_NONE
