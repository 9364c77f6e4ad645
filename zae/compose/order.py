"""The order of add-ons in a trainer class: by their layers, and by what they declare of each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zae.compose.introspect import LAYERS, traits_of
from zae.errors import AddOnOrder

if TYPE_CHECKING:
    from zae.compose.metaclass import TrainerMeta

__all__ = ["arrange", "is_inside", "is_named_in", "label_of", "relations_of"]


def arrange(add_ons: Iterable[TrainerMeta]) -> tuple[TrainerMeta, ...]:
    """Order add-ons, outermost first, by their layers and by ``inside`` / ``outside``; ties go by name."""
    # From the innermost to the outermost: of those that nothing waiting must be inside of, the first by layer and name.
    waiting = sorted(set(add_ons), key=lambda a: (LAYERS.index(a.layer), a.__name__, a.__module__))
    ordered: list[TrainerMeta] = []
    while waiting:
        ready = [a for a in waiting if not any(is_inside(b, a) for b in waiting if b is not a)]
        if not ready:
            names = ", ".join(a.__name__ for a in waiting)
            relations = "; ".join(relations_of(a) for a in waiting)
            raise AddOnOrder(
                f"no order of {names} satisfies their declarations: {relations}; change a layer, or remove one of "
                "the inside / outside relations"
            )
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return tuple(reversed(ordered))


def is_inside(a: TrainerMeta, b: TrainerMeta) -> bool:
    """Return whether ``a`` must be inside of ``b``."""
    if is_named_in(b, a.inside) or is_named_in(a, b.outside):
        return True
    return LAYERS.index(a.layer) < LAYERS.index(b.layer)


def is_named_in(add_on: TrainerMeta, names: Iterable[str | type]) -> bool:
    """Return whether a list of traits, slots, classes and their names has one of an add-on or of its bases."""
    kinds_or_traits = {*names}
    if not kinds_or_traits:
        return False
    kinds = {label for kind in add_on.__mro__ for label in (kind, kind.__name__)}
    return not kinds_or_traits.isdisjoint(kinds | traits_of(add_on))


def relations_of(add_on: TrainerMeta) -> str:
    """Describe the layer and the relations of an add-on."""
    texts = [f"{add_on.__name__} is in layer {add_on.layer!r}"]
    texts += [f"inside {label_of(name)}" for name in add_on.inside]
    texts += [f"outside {label_of(name)}" for name in add_on.outside]
    return ", ".join(texts)


def label_of(name: str | type) -> str:
    """Return the name of an add-on that is given as a class or by its name."""
    return name if isinstance(name, str) else name.__name__
