"""Check a trainer class or an add-on as it is defined, and refuse it with the line to write."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

from zae.compose.introspect import (
    LAYERS,
    add_ons_of,
    classes_to_initialize,
    function_of,
    hooks_of,
    is_add_on,
    is_base,
    is_marked,
    is_trainer,
    mentions_super,
)
from zae.errors import AddOnError, AddOnOrder, TaskError, did_you_mean, is_one_letter_off

__all__ = ["STEPS", "check_class", "error_for"]

FIXED = ("run", "run_epoch", "run_batch", "add_on", "evaluate", "inference", "predict")
"""The loop itself, which an add-on must not override."""

_DATA_METHODS = ("evaluate", "predict")
"""The methods of `FIXED` that an add-on may override with a call of ``super()``, for instance to make the loader."""

STEPS = ("train_step", "test_step", "predict_step")
"""What a task defines, and the loop calls for each batch."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_class(cls: Any) -> None:
    """Refuse a class with methods that would not be called, would not work, or would disable an add-on."""
    if is_base(cls):
        return
    if is_add_on(cls):
        _check_declaration(cls)
        _check_init(cls)
    else:
        _check_bases(cls)
    for klass in (cls, *_plain_mixins(cls)):
        _check_methods(cls, klass)
    _warn_of_names(cls)
    _check_steps(cls)


# ------------------------------------------------------------------------------------------ an add-on's own


def _check_declaration(cls: Any) -> None:
    """Refuse an invalid layer, relation, slot or ``apply``, and an override of the loop."""
    name = cls.__name__
    if cls.layer not in LAYERS:
        raise AddOnError(f"{name}.layer is {cls.layer!r}; it must be one of {', '.join(LAYERS)}")
    for relation in ("inside", "outside", "requires"):
        value = getattr(cls, relation)
        if not isinstance(value, (tuple, list)) or not all(isinstance(v, (str, type)) for v in value):
            label = value.__name__ if isinstance(value, type) else repr(value)
            raise AddOnError(
                f"{name}.{relation} is {label}; it must be a tuple of add-ons or their names: {relation} = ({label},)"
            )
    if not isinstance(cls.traits, (tuple, list)) or not all(isinstance(trait, str) for trait in cls.traits):
        raise AddOnError(f"{name}.traits is {cls.traits!r}; it must be a tuple of names: traits = ('divides_weights',)")
    _check_attributes(cls, name)
    if not (cls.slot is None or (isinstance(cls.slot, str) and cls.slot)):
        raise AddOnError(f"{name}.slot is {cls.slot!r}; it must be a name, or None")
    parents = [c for c in cls.__bases__ if is_add_on(c) and not is_base(c)]
    if len({c.layer for c in parents}) > 1 or len({c.slot for c in parents if c.slot}) > 1:
        names = ", ".join(c.__name__ for c in parents)
        raise AddOnError(
            f"{name} derives from {names}, which belong in different places; use .add_on({names}), or bundle them: "
            f"@classmethod def apply(cls, base_cls): return base_cls.add_on({names})"
        )
    if "apply" in cls.__dict__ and not isinstance(cls.__dict__["apply"], classmethod):
        raise AddOnError(f"{name}.apply is not a classmethod; write @classmethod def apply(cls, base_cls)")
    for fixed in FIXED:
        if fixed in cls.__dict__ and not (fixed in _DATA_METHODS and mentions_super(cls.__dict__[fixed])):
            raise AddOnError(
                f"{name} overrides {fixed}, which is the loop itself; override a hook inside it, for instance "
                "gradients, backward, optimizer_step or logging (Trainer.explain() shows where each is called)"
            )


def _check_attributes(cls: Any, name: str) -> None:
    """Refuse invalid declarations of attributes."""
    for declared in ("state_attributes", "rank_state_attributes"):
        value = getattr(cls, declared)
        if not isinstance(value, (tuple, list)) or not all(isinstance(v, str) and v.isidentifier() for v in value):
            raise AddOnError(f"{name}.{declared} is {value!r}; it must be a tuple of names: {declared} = ('count',)")
    if not isinstance(cls.process_attributes, dict):
        value = cls.process_attributes
        raise AddOnError(
            f"{name}.process_attributes is {value!r}; it must be a dict of names and the values that a copy has: "
            "process_attributes = {'_file': None}"
        )


def _check_init(cls: Any) -> None:
    """Refuse an ``__init__`` that does not pass the options of others on."""
    init = cls.__dict__.get("__init__")
    if not isinstance(init, FunctionType):
        return
    parameters = list(inspect.signature(init).parameters.values())[1:]
    kinds = {p.kind for p in parameters}
    options = [p for p in parameters if p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)]
    signature = "".join(f", {p.name}" + ("" if p.default is p.empty else "=...") for p in options)
    right = f"def __init__(self, *args{signature}, **kwargs)"
    if kinds & set(_POSITIONAL):
        raise AddOnError(
            f"{cls.__name__}.__init__ takes {next(p.name for p in parameters if p.kind in _POSITIONAL)!r} by position, "
            f"but positional arguments belong to the trainer; write {right}"
        )
    if not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        raise AddOnError(f"{cls.__name__}.__init__ does not accept the arguments of the trainer; write {right}")


# ------------------------------------------------------------------------------------------ where a class stands


def _plain_mixins(cls: Any) -> Iterator[Any]:
    """Yield the user's bases of a class that are not trainers."""
    for klass in classes_to_initialize(cls):
        if not is_trainer(klass) and klass.__module__ not in ("builtins", "typing", "typing_extensions", "abc"):
            yield klass


def _check_bases(cls: Any) -> None:
    """Refuse a trainer outside of an add-on, and a mixin behind Trainer."""
    mro = cls.__mro__
    for index, klass in enumerate(mro[1:], start=1):
        # A class derived from add-ons is meant to be outside of them.
        if is_trainer(klass) and not is_add_on(klass) and not add_ons_of(klass):
            inner = [a for a in mro[index:] if is_add_on(a) and a not in klass.__mro__]
            if inner:
                raise AddOnOrder(
                    f"{cls.__name__} has {klass.__name__} outside of {inner[0].__name__}, where it would see the loop "
                    f"before the add-on does; write class {cls.__name__}({inner[0].__name__}, {klass.__name__})"
                )
        if (klass.__module__, klass.__name__) == ("torch.nn.modules.module", "Module"):
            raise TaskError(
                f"{cls.__name__} is a torch.nn.Module and a Trainer, and cannot be both; derive from Trainer alone, "
                "and give the model to it, where it is self.model"
            )
    for klass in mro[len(classes_to_initialize(cls)) :]:
        if isinstance(klass.__dict__.get("__init__"), FunctionType) and not getattr(klass, "_is_protocol", False):
            raise AddOnOrder(
                f"{cls.__name__} has {klass.__name__} after Trainer, so {klass.__name__}.__init__ would never run; "
                f"name it first: class {cls.__name__}({klass.__name__}, ...)"
            )


# ------------------------------------------------------------------------------------------------ its methods


def _check_methods(cls: Any, klass: Any) -> None:
    """Refuse an ``@override`` without a base method, and a method of the wrong kind."""
    behind = cls.__mro__[cls.__mro__.index(klass) + 1 :]
    bases = classes_to_initialize(cls)[-1].__mro__
    trainers = [c for c in behind if is_trainer(c) or c in bases]
    for name, value in klass.__dict__.items():
        inherited = any(name in c.__dict__ for c in behind)
        if is_marked(value, "__override__") and not inherited:
            names: set[str] = set()
            for base in behind:
                names.update(name for name in base.__dict__ if not name.startswith("_"))
            raise error_for(klass)(
                f"{klass.__name__}.{name} is marked @override, but no base has {name!r}{did_you_mean(name, names)}"
            )
        if name.startswith("_"):
            continue
        ours = [c.__dict__[name] for c in trainers if name in c.__dict__]
        if ours and isinstance(function_of(ours[0]), FunctionType):
            _check_kind(klass, name, value, ours[0])
            _check_signature(klass, name, value, ours[0])


def _warn_of_names(cls: Any) -> None:
    """Warn of methods that look like hooks and that the loop does not call; they may be the class's own."""
    hooks = [s for s in (*hooks_of(cls), *STEPS, *FIXED) if len(s) > 5 or s == "setup"]
    inherited = {name for base in cls.__mro__[1:] for name in base.__dict__}
    texts = []
    for name, value in cls.__dict__.items():
        if name in inherited or not isinstance(function_of(value), FunctionType) or is_marked(value, "__hook__"):
            continue
        from zae.compose.hints import HOOKS  # A class with hooks alone does not need the table.

        if name in HOOKS:
            texts.append(f"{cls.__name__}.{name} is not called by the loop (here it is {HOOKS[name]})")
        elif name[0] != "_" and (near := next((hook for hook in hooks if is_one_letter_off(name, hook)), "")):
            texts.append(f"{cls.__name__}.{name} is not called by the loop (did you mean {near!r}?)")
    if texts:
        text = f"{'; '.join(texts)}. If your code calls it, nothing is wrong"
        warnings.warn(text, UserWarning, stacklevel=4)  # At the class statement.


def error_for(klass: Any) -> type[TaskError]:
    """Return the type of an error about a class of the user: an add-on, or a task."""
    return AddOnError if is_add_on(klass) else TaskError


def _check_kind(klass: Any, name: str, value: Any, ours: Any) -> None:
    """Refuse a property in place of a method, a method in place of a property, and other values."""
    where = f"{klass.__name__}.{name}"
    function = function_of(value)
    is_property = isinstance(value, (property, cached_property))
    if isinstance(ours, property):
        if is_property:
            return
        if isinstance(function, FunctionType):
            raise error_for(klass)(f"{where} is a property of the trainer; put @property above it")
        raise error_for(klass)(f"{where} = {value!r:.60} hides the trainer's property {name!r}; give it another name")
    if is_property:
        raise error_for(klass)(f"{where} is a property, but the trainer calls it; remove @property, or rename it")
    if not (callable(value) or isinstance(function, FunctionType)):
        raise error_for(klass)(f"{where} = {value!r:.60} hides the trainer's method {name}(); give it another name")
    if inspect.isgeneratorfunction(value) and name.endswith("_context"):
        raise error_for(klass)(
            f"{where} yields, and must be a context manager; put @contextlib.contextmanager above it"
        )


def _check_signature(klass: Any, name: str, value: Any, ours: Any) -> None:
    """Refuse an override that cannot be called as the loop calls it."""
    if isinstance(ours, property) or not isinstance(value, (FunctionType, staticmethod)):
        return
    parameters = list(inspect.signature(function_of(ours)).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    if is_marked(ours, "__by_name__"):
        parameters = [p for p in parameters if p.default is p.empty]
    count = sum(p.kind in _POSITIONAL for p in parameters) - isinstance(value, staticmethod)
    signature = inspect.signature(value)
    try:
        signature.bind(*range(count))
    except TypeError:
        right = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters if p.kind in _POSITIONAL
        )
        raise error_for(klass)(
            f"{klass.__name__}.{name}{signature} does not fit the call in the loop; write def {name}({right}), or give "
            "a method of your own another name"
        ) from None


def _check_steps(cls: Any) -> None:
    """Refuse an add-on that takes the task's own step away."""
    if not is_add_on(cls):
        return
    for name in set(STEPS) & cls.__dict__.keys():
        value = cls.__dict__[name]
        if not is_marked(value, "__replaces__") and not mentions_super(value):
            raise AddOnError(
                f"{cls.__name__}.{name} overrides the task's own step without calling super(); call "
                f"super().{name}(...), or mark the method with @zae.replaces if it replaces the step on purpose"
            )
