"""How a trainer class is made of add-ons: arranged, checked, named, cached and pickled.

`TrainerMeta` is the metaclass of `zae.Trainer`. It looks at every class once, when the class is created, and at
every call before any ``__init__`` runs, so that a composition either works or is refused with the line to write.
"""

from __future__ import annotations

import copyreg
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from types import CodeType, FunctionType
from typing import Any, TypeVar

from zae.errors import AddOnConflict, AddOnError, AddOnOrder, AddOnRequirement, OptionError, did_you_mean
from zae.hints import foreign_hook, foreign_option

__all__ = ["LAYERS", "TrainerMeta", "add_ons_of", "compose", "options_of", "replaces", "seam", "seams_of", "slots_of"]

LAYERS = ("model", "loop", "precision", "parallel", "state", "control", "observe")
"""Where an add-on sits, innermost first."""

FIXED = frozenset({"run", "run_epoch", "run_batch", "add_on", "evaluate", "inference"})
"""The loop itself: an add-on overrides the seams inside it, never these."""

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def seam(function: AnyFunction) -> AnyFunction:
    """Mark a method as a seam: a verb that add-ons override, calling ``super()``.

    Parameters
    ----------
    function : callable
        The method, or the getter of a property (put ``@property`` above).

    Examples
    --------
    >>> from zae import Trainer
    >>> Trainer.clip.__seam__
    True
    """
    function.__seam__ = True  # type: ignore[attr-defined]
    return function


def replaces(function: AnyFunction) -> AnyFunction:
    """Mark an override that means not to call ``super()``: it does the seam's whole work itself.

    Parameters
    ----------
    function : callable
        The overriding method.

    Examples
    --------
    >>> from zae import AddOnBase, replaces
    >>> class SignAddon(AddOnBase):
    ...     "Step by the sign of the gradient."
    ...     layer = "loop"
    ...     @replaces
    ...     def clip(self):
    ...         for parameter in self.model.parameters():
    ...             parameter.grad.sign_()
    """
    function.__replaces__ = True  # type: ignore[attr-defined]
    return function


class TrainerMeta(ABCMeta):
    """Metaclass of every trainer and every add-on."""

    _is_addon: bool
    _recipe: tuple[TrainerMeta, tuple[TrainerMeta, ...]]
    _compositions: dict[tuple[TrainerMeta, ...], TrainerMeta]
    # What an add-on declares; see zae.addon.AddOnBase.
    layer: str
    inside: tuple[str | type, ...]
    outside: tuple[str | type, ...]
    slot: str | None
    requires: tuple[str | type, ...]
    apply: Callable[[Any], Any]

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> TrainerMeta:
        parents = [base for base in bases if isinstance(base, TrainerMeta)]
        namespace.setdefault("_is_addon", bool(parents) and all(base._is_addon for base in parents))
        cls = super().__new__(mcls, name, bases, namespace, **kwargs)
        if parents:
            _check_hooks(cls)
            _check_super(cls)
            if not cls._is_addon:
                _check_composition(cls)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls._is_addon:
            raise AddOnError(
                f"{cls.__name__} is an add-on and does not run alone; "
                f"write Task.add_on({cls.__name__})(...), or class MyTrainer({cls.__name__}, Task), with your own Task"
            )
        _check_abstract(cls)
        _check_call(cls, args, kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Every option that the class takes, whoever owns it."""
        return inspect.Signature([parameter for parameter, _ in options_of(cls).values()])

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__name__}'>"


def add_ons_of(cls: TrainerMeta) -> list[TrainerMeta]:
    """List the add-ons of a class, outermost first.

    Examples
    --------
    >>> from zae import Trainer
    >>> from zae.addons import AMPAddon, StateManagerAddon
    >>> [a.__name__ for a in add_ons_of(Trainer.add_on(AMPAddon, StateManagerAddon))]
    ['StateManagerAddon', 'AMPAddon']
    """
    mixed = [c for c in cls.__mro__ if isinstance(c, TrainerMeta) and c._is_addon]
    leaves = [a for a in mixed if not any(b is not a and issubclass(b, a) for b in mixed)]
    applied = [a for c in cls.__mro__ for a in c.__dict__.get("_applied", ())]
    return leaves + [a for a in applied if a not in leaves]


def slots_of(cls: Any) -> dict[str, TrainerMeta]:
    """Map each filled slot to the add-on that fills it."""
    return {add_on.slot: add_on for add_on in add_ons_of(cls) if add_on.slot}


def seams_of(cls: TrainerMeta) -> dict[str, TrainerMeta]:
    """Map each seam of a class to the class that introduced it, in the order of their definition."""
    found: dict[str, TrainerMeta] = {}
    classes: list[Any] = list(reversed(cls.__mro__))
    for klass in classes:
        for name, value in klass.__dict__.items():
            if getattr(_function(value), "__seam__", False):
                found.setdefault(name, klass)
    return found


# ------------------------------------------------------------------------------------------------- composing


def compose(base: TrainerMeta, add_ons: Sequence[Any]) -> TrainerMeta:
    """Return the one class made of ``base`` and a set of add-ons; the order they are given in does not matter.

    Parameters
    ----------
    base : type
        A trainer class, composed already or not; it is left as it is.
    add_ons : sequence of type or str
        Add-on classes, or names of the entry-point group ``zae.addons``.

    Raises
    ------
    AddOnConflict, AddOnRequirement, AddOnOrder, AddOnError
        With the remedy; no class is made.
    """
    if base._is_addon:
        raise AddOnError(f"{base.__name__} is an add-on, not a trainer; write Task.add_on({base.__name__}, ...)")
    named = [_resolve(base, add_on) for add_on in add_ons]
    root, present = base.__dict__.get("_recipe", (base, ()))
    wanted = _outermost_kinds([*present, *(a for a in named if not issubclass(root, a) and a not in _applied(root))])
    if not wanted:
        return root
    ordered = arrange(wanted)
    made = root.__dict__.get("_compositions")
    if made is None:
        made = {}
        root._compositions = made
    if ordered not in made:
        _check_set([*ordered, *add_ons_of(root)], root)
        made[ordered] = _build(root, ordered)
    return made[ordered]


def arrange(add_ons: Iterable[TrainerMeta]) -> tuple[TrainerMeta, ...]:
    """Order add-ons, outermost first, by their layers and by ``inside`` / ``outside``; ties go by name."""
    waiting = sorted(set(add_ons), key=lambda a: (LAYERS.index(a.layer), a.__name__, a.__module__))
    ordered: list[TrainerMeta] = []
    while waiting:
        ready = [a for a in waiting if not any(_is_inside(b, a) for b in waiting if b is not a)]
        if not ready:
            names = ", ".join(a.__name__ for a in waiting)
            relations = "; ".join(_relations(a) for a in waiting)
            raise AddOnOrder(
                f"no order fulfils what {names} ask for: {relations}; "
                "change the layer, or drop one of the inside / outside relations"
            )
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return tuple(reversed(ordered))


def _is_inside(a: TrainerMeta, b: TrainerMeta) -> bool:
    """Whether ``a`` must sit nearer to the loop than ``b``."""
    if LAYERS.index(a.layer) != LAYERS.index(b.layer):
        return LAYERS.index(a.layer) < LAYERS.index(b.layer) or _named_in(b, a.inside) or _named_in(a, b.outside)
    return _named_in(b, a.inside) or _named_in(a, b.outside)


def _named_in(add_on: TrainerMeta, names: Iterable[Any]) -> bool:
    """Whether an add-on, or a class it derives from, is in a list of names and classes."""
    return any(c is name or c.__name__ == name for name in names for c in add_on.__mro__)


def _relations(add_on: TrainerMeta) -> str:
    """What an add-on asks of the order, in words."""
    named = [f"inside {_label(n)}" for n in add_on.inside] + [f"outside {_label(n)}" for n in add_on.outside]
    return f"{add_on.__name__} is in layer {add_on.layer!r}" + "".join(f", {n}" for n in named)


def _label(name: Any) -> str:
    return name if isinstance(name, str) else str(name.__name__)


def _resolve(base: TrainerMeta, add_on: Any) -> TrainerMeta:
    """Take an add-on class as it is, and look a name up among the installed entry points."""
    if isinstance(add_on, str):
        known = {point.name: point for point in metadata.entry_points(group="zae.addons")}
        found = known.get(add_on) or known.get(add_on + "Addon")
        if found is None:
            hint = did_you_mean(add_on, known) or f"; installed are {', '.join(sorted(known))}"
            raise AddOnError(f"no add-on is called {add_on!r}{hint}")
        add_on = found.load()
    if not isinstance(add_on, type):
        raise AddOnError(f"add_on() takes classes, and got an instance, {add_on!r:.80}; write add_on(SomeAddon)")
    if not (isinstance(add_on, TrainerMeta) and add_on._is_addon):
        raise AddOnError(
            f"{add_on.__name__} is not an add-on; write class {add_on.__name__}(AddOnBase), "
            f"and {base.__name__}.add_on({add_on.__name__})"
        )
    return add_on


def _outermost_kinds(add_ons: Iterable[TrainerMeta]) -> list[TrainerMeta]:
    """Drop what is there twice: the same add-on, or the base of another one."""
    unique = list(dict.fromkeys(add_ons))
    return [a for a in unique if not any(b is not a and issubclass(b, a) for b in unique)]


def _applied(root: TrainerMeta) -> list[TrainerMeta]:
    return [a for c in root.__mro__ for a in c.__dict__.get("_applied", ())]


def _build(root: TrainerMeta, ordered: tuple[TrainerMeta, ...]) -> TrainerMeta:
    """Make the class; an add-on that overrides ``apply`` is asked to wrap what is inside of it."""
    cls: TrainerMeta = root
    mixins: list[TrainerMeta] = []
    for add_on in reversed(ordered):
        own_apply = _overridden_apply(add_on)
        if own_apply is None:
            mixins.insert(0, add_on)
            continue
        inner = _derive(cls, root, mixins, ordered) if mixins else cls
        cls, mixins = own_apply(inner), []
        if not (isinstance(cls, TrainerMeta) and issubclass(cls, inner)):
            raise AddOnError(f"{add_on.__name__}.apply(base_cls) returned {cls!r}; return a subclass of base_cls")
        cls._applied = (*inner.__dict__.get("_applied", ()), add_on)  # type: ignore[attr-defined]
    composed = _derive(cls, root, mixins, ordered)
    composed._recipe = (root, ordered)
    return composed


def _derive(cls: TrainerMeta, root: TrainerMeta, mixins: list[TrainerMeta], ordered: Sequence[TrainerMeta]) -> Any:
    """Make one class with the mixins outside of ``cls``."""
    name = f"{root.__name__}[{', '.join(a.__name__ for a in ordered)}]"
    lines = [f"{root.__name__} with add-ons, outermost first:", ""]
    lines += [f"- {a.__name__}: {(inspect.getdoc(a) or 'no description').splitlines()[0]}" for a in ordered]
    if root.__doc__:
        lines += ["", inspect.getdoc(root) or ""]
    namespace = {"__module__": root.__module__, "__qualname__": name, "__doc__": "\n".join(lines)}
    return TrainerMeta(name, (*mixins, cls), namespace)


def _overridden_apply(add_on: TrainerMeta) -> Callable[[TrainerMeta], Any] | None:
    """The add-on's own ``apply``, when it has one beside AddOnBase's."""
    for klass in add_on.__mro__:
        if "apply" in klass.__dict__:
            return None if klass.__dict__.get("_is_base") else add_on.apply
    return None


def _rebuild(root: TrainerMeta, ordered: tuple[TrainerMeta, ...]) -> TrainerMeta:
    """Find a composed class again, in whichever process a pickle is read."""
    return compose(root, ordered)


def _reduce(cls: TrainerMeta) -> Any:
    """Pickle a composed class as its recipe and every other class by its name."""
    recipe = cls.__dict__.get("_recipe")
    return cls.__qualname__ if recipe is None else (_rebuild, recipe)


copyreg.pickle(TrainerMeta, _reduce)

# -------------------------------------------------------------------------------------- checks of a class


def _check_composition(cls: TrainerMeta) -> None:
    """Refuse a hand-written class whose add-ons do not go together, or stand in the wrong order."""
    add_ons = add_ons_of(cls)
    _check_set(add_ons, cls)
    mixed = [a for a in cls.__mro__ if a in add_ons]
    for outer, inner in ((a, b) for i, a in enumerate(mixed) for b in mixed[i + 1 :]):
        if _is_inside(outer, inner):
            base = next(c for c in cls.__mro__ if isinstance(c, TrainerMeta) and not c._is_addon and c is not cls)
            right = ", ".join(a.__name__ for a in arrange(mixed))
            raise AddOnOrder(
                f"{cls.__name__} puts {outer.__name__} outside of {inner.__name__}, but {outer.__name__} belongs "
                f"inside ({_relations(outer)}; {_relations(inner)}); put all add-ons in one place: "
                f"class {cls.__name__}({right}, {base.__name__}), or leave the order to add_on"
            )


def _check_set(add_ons: Sequence[TrainerMeta], cls: TrainerMeta) -> None:
    """Refuse two fillers of a slot, a missing requirement, an unknown layer, two owners of one option."""
    slots: dict[str, TrainerMeta] = {}
    for add_on in add_ons:
        if add_on.slot and slots.setdefault(add_on.slot, add_on) is not add_on:
            first, second = sorted((slots[add_on.slot].__name__, add_on.__name__))
            raise AddOnConflict(f"{first} and {second} both fill the slot {add_on.slot!r}; keep one")
    for add_on in add_ons:
        for need in add_on.requires:
            if not any(_named_in(other, [need]) for other in add_ons):
                names = ", ".join(sorted({a.__name__ for a in add_ons} | {_label(need)}))
                raise AddOnRequirement(
                    f"{add_on.__name__} needs {_label(need)}, which is not there; write .add_on({names})"
                )
    _check_option_owners(add_ons, cls)


def _check_option_owners(add_ons: Sequence[TrainerMeta], cls: TrainerMeta) -> None:
    """Refuse an option that two add-ons, or an add-on and the trainer, both declare."""
    owners: dict[str, Any] = {name: c for c in reversed(cls.__mro__) for name in _own_parameters(c) if not _mixin(c)}
    for klass in dict.fromkeys(c for add_on in add_ons for c in add_on.__mro__ if _mixin(c)):
        for name in _own_parameters(klass):
            if owners.setdefault(name, klass) is not klass and not issubclass(klass, owners[name]):
                raise AddOnConflict(
                    f"{klass.__name__} and {owners[name].__name__} both have an option {name!r}; "
                    "rename one of them, or put it into a base that both add-ons share"
                )


def _mixin(cls: type) -> bool:
    return isinstance(cls, TrainerMeta) and cls._is_addon


def _function(value: Any) -> Any:
    """The plain function behind a property, a classmethod, a staticmethod or a wrapper."""
    if isinstance(value, property):
        value = value.fget
    return inspect.unwrap(value) if callable(value) else getattr(value, "__func__", value)


def _names(code: CodeType) -> Iterator[str]:
    """Every attribute and global that a function, or one nested in it, mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _calls_super(function: FunctionType, name: str) -> bool:
    names = set(_names(function.__code__))
    return name in names and ("super" in names or "__class__" in function.__code__.co_freevars)


def _check_super(cls: TrainerMeta) -> None:
    """Refuse a seam that is overridden without ``super()`` while that would drop another add-on's work."""
    seams = seams_of(cls)
    for name, value in cls.__dict__.items():
        function = _function(value)
        if seams.get(name, cls) is cls or not isinstance(function, FunctionType):
            continue
        if getattr(function, "__replaces__", False) or _calls_super(function, name):
            continue
        below = [c for c in cls.__mro__[1:] if _mixin(c) and name in c.__dict__ and not c.__dict__.get("_is_base")]
        if cls._is_addon or below:
            dropped = f"drops what {below[0].__name__} does there" if below else "drops what is inside of it"
            call = f"super().{name}" + ("" if isinstance(value, property) else "(...)")
            raise AddOnError(
                f"{cls.__name__}.{name} overrides a seam without calling super(), and so {dropped}; call {call}, "
                "or mark the method with @zae.replaces if it does the whole work itself"
            )


def _check_hooks(cls: TrainerMeta) -> None:
    """Refuse a loop method in an add-on, an ``@override`` of nothing, and a misspelt or foreign hook."""
    if cls.__dict__.get("_is_base"):
        return
    if cls._is_addon:
        if cls.layer not in LAYERS:
            raise AddOnError(f"{cls.__name__}.layer is {cls.layer!r}; it must be one of {', '.join(LAYERS)}")
        for name in FIXED & cls.__dict__.keys():
            raise AddOnError(
                f"{cls.__name__} overrides {name}, which is the loop itself; override a seam inside it: "
                f"{', '.join(seams_of(cls))}"
            )
    known = {name for base in cls.__mro__[1:] for name in base.__dict__}
    for name, value in cls.__dict__.items():
        if name in known or name.startswith("_") or not isinstance(_function(value), FunctionType):
            continue
        seams = [*seams_of(cls), "train_step", "test_step", *FIXED]
        hint = foreign_hook(name)
        near = did_you_mean(name, [s for s in seams if len(s) > 5], cutoff=0.87) if len(name) > 5 else ""
        if getattr(value, "__override__", False):
            raise AddOnError(
                f"{cls.__name__}.{name} is marked @override, but no base has {name!r}{did_you_mean(name, known)}"
            )
        if hint or near:
            raise AddOnError(
                f"{cls.__name__}.{name} would never be called{near or '; ' + hint}; "
                "if the method is your own, give it another name or begin it with an underscore"
            )


# --------------------------------------------------------------------------------------- checks of a call


def options_of(cls: TrainerMeta) -> dict[str, tuple[inspect.Parameter, type]]:
    """Map each option that a class takes to its parameter and its owner, positional ones first.

    Examples
    --------
    >>> from zae import Trainer
    >>> from zae.addons import EMAAddon
    >>> parameter, owner = options_of(Trainer.add_on(EMAAddon))["decay"]
    >>> owner.__name__
    'EMAAddon'
    """
    positional: dict[str, tuple[inspect.Parameter, type]] = {}
    keyword: dict[str, tuple[inspect.Parameter, type]] = {}
    for klass in cls.__mro__:
        if not isinstance(klass, TrainerMeta) or "__init__" not in klass.__dict__:
            continue
        parameters = _own_parameters(klass)
        takes_position = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        into = keyword if positional else positional
        for p in takes_position:
            if p.name not in positional:
                kind = p.kind if into is positional else p.KEYWORD_ONLY
                into.setdefault(p.name, (p.replace(kind=kind), klass))
        for p in parameters.values():
            if p.kind is p.KEYWORD_ONLY and p.name not in positional:
                keyword.setdefault(p.name, (p, klass))
        if not any(p.kind is p.VAR_KEYWORD for p in _parameters(klass)):
            break
    return {**positional, **keyword}


def _parameters(cls: type) -> list[inspect.Parameter]:
    init = cls.__dict__.get("__init__")
    return list(inspect.signature(init).parameters.values())[1:] if isinstance(init, FunctionType) else []


def _own_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The options that a class itself declares in ``__init__``."""
    skip = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p for p in _parameters(cls) if p.kind not in skip}


def _check_call(cls: TrainerMeta, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an unknown, a doubled or a missing argument before any ``__init__`` runs."""
    options = options_of(cls)
    positional = [name for name, (p, _) in options.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        raise OptionError(
            f"{cls.__name__} takes {len(positional)} positional arguments ({', '.join(positional)}) "
            f"and got {len(args)}; name the others: {', '.join(list(options)[len(positional) :])}"
        )
    for name in kwargs:
        if name not in options:
            raise OptionError(f"unknown argument {name!r} for {cls.__name__}{_cure(name, options)}")
        if name in positional[: len(args)]:
            raise OptionError(f"{cls.__name__} got {name!r} twice: by position and by name; keep one")
    for name, (parameter, owner) in options.items():
        if parameter.default is parameter.empty and name not in kwargs and name not in positional[: len(args)]:
            whose = "" if owner is cls else f", an option of {owner.__name__}"
            raise OptionError(f"{cls.__name__} needs {name!r}{whose}; write {cls.__name__}(..., {name}=...)")


def _cure(name: str, options: Iterable[str]) -> str:
    """What to write instead of an option that the class does not have."""
    owners = {option: a for a in _known_add_ons() for c in a.__mro__ if _mixin(c) for option in _own_parameters(c)}
    if name in owners:
        return f": it is an option of {owners[name].__name__}; add it with .add_on({owners[name].__name__})"
    foreign = foreign_option(name)
    if foreign:
        return f"; {foreign}"
    near = did_you_mean(name, options)
    if near:
        return near
    near = did_you_mean(name, owners)
    if near:
        option = near.split("'")[1]
        return f"{near[:-1]}, an option of {owners[option].__name__}? Add it with .add_on({owners[option].__name__})"
    return f"; it has {', '.join(options)}"


def _known_add_ons() -> list[TrainerMeta]:
    """The add-ons that are installed with zae or defined by now; only looked up for an error message."""
    for point in metadata.entry_points(group="zae.addons"):
        if point.dist is None or point.dist.name == "zae":
            point.load()
    found: list[TrainerMeta] = []
    waiting: list[Any] = list(_BASES)
    while waiting:
        subclasses: list[Any] = type.__subclasses__(waiting.pop())
        for cls in subclasses:
            if _mixin(cls) and cls not in found:
                found.append(cls)
                waiting.append(cls)
    return found


_BASES: list[Any] = []
"""AddOnBase, which registers itself here: this module is below it."""


def _check_abstract(cls: TrainerMeta) -> None:
    """Refuse a class without its steps, showing the few lines to write."""
    missing = sorted(cls.__abstractmethods__)
    if not missing:
        return
    root, ordered = cls.__dict__.get("_recipe", (cls, ()))
    name = "MyTask" if root.__name__ == "Trainer" else root.__name__
    made = f"{name}.add_on({', '.join(a.__name__ for a in ordered)})" if ordered else name
    bodies = {
        "train_step": [
            "    def train_step(self, batch):",
            "        inputs, targets = batch",
            '        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}',
        ],
        "test_step": ["    def test_step(self, batch):", "        return self.train_step(batch)"],
    }
    lines = [f"class {name}(Trainer):", *(line for m in missing for line in bodies.get(m, [f"    def {m}(self): ..."]))]
    raise OptionError(
        f"{cls.__name__} cannot be instantiated: it has no {' and no '.join(missing)}. Write:\n\n"
        + "\n".join(lines)
        + f"\n\ntrainer = {made}(model, optimizer=optimizer, ...)"
    )
