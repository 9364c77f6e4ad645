"""AddOnBase: the base class of add-ons."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from zae.compose.composition import mix
from zae.compose.introspect import LAYERS, hook, repeats, replaces
from zae.description import Description
from zae.errors import CheckpointMismatch
from zae.loop.addon_state import (
    GENERATORS,
    Generators,
    as_saved,
    attributes_by_owner,
    check_attributes,
    read_attributes,
)
from zae.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LAYERS", "AddOnBase", "Description", "as_saved", "hook", "repeats", "replaces"]

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class AddOnBase(Trainer):
    """Base class of add-ons: mixins that override hooks of the loop and call ``super()``.

    ``Task.add_on(MyAddon)`` makes a trainer class with the add-on outside of ``Task``, at the place of its layer. The
    options of an add-on are the keyword-only parameters of its ``__init__``, which only stores them; it acts in
    ``setup``. See docs/extending/addons.md.

    Attributes
    ----------
    layer : str
        One of ``model < loop < precision < parallel < state < control < observe``, innermost first.
    traits : tuple of str
        What this one does that others must know of, for instance "divides_weights"; docs/extending/addons.md has a
        list. A derived class adds to those of its base.
    inside, outside : tuple of str or type
        Add-ons that this one must be inside of, or outside of, whatever their layers' ties: a trait, a slot, or a class
        or its name.
    slot : str or None
        At most one add-on of a trainer may fill a slot.
    requires : tuple of str or type
        Add-ons that must be there too.
    excludes : dict of str to str
        Traits and slots that no other add-on may have, with why and what to write instead.
    state_attributes : tuple of str
        Attributes that checkpoints contain, the same on every rank: tensors, numbers, text, and lists, tuples and dicts
        of them. A private one is saved without its leading underscore.
    rank_state_attributes : tuple of str
        Attributes that checkpoints contain for each rank. A resume on another number of ranks gives all of them the
        values of rank 0, and warns, unless the add-on overrides ``merge_ranks``.
    process_attributes : dict of str to object
        Attributes that belong to this process, such as an open file, with the values that a copy of the trainer has.
    replicated_options : dict of str to str
        Options that must be the same on all ranks, each with the hook that reads it: what a step computes, and when
        ranks exchange something. A rank with another value is refused as a run begins.
    lockstep_forward : bool
        Whether the ranks of its engine compute every forward together, so that none may compute one more than others.
    checks_model : bool
        Whether ``start_from`` loads the state of this add-on with the weights: it refuses those that do not fit.

    Examples
    --------
    >>> from zae import AddOnBase
    >>> class CountAddon(AddOnBase):
    ...     "Count the optimizer steps that took place."
    ...     layer = "observe"
    ...     state_attributes = ("count",)
    ...     def __init__(self, *args, start: int = 0, **kwargs):
    ...         super().__init__(*args, **kwargs)
    ...         self.count = start
    ...     def optimizer_step(self):
    ...         stepped = super().optimizer_step()
    ...         self.count += stepped
    ...         return stepped
    """

    _is_addon = True
    _is_base = True
    layer: ClassVar[str] = "observe"
    inside: ClassVar[tuple[str | type, ...]] = ()
    outside: ClassVar[tuple[str | type, ...]] = ()
    slot: ClassVar[str | None] = None
    traits: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str | type, ...]] = ()
    excludes: ClassVar[Mapping[str, str]] = {}
    state_attributes: ClassVar[tuple[str, ...]] = ()
    rank_state_attributes: ClassVar[tuple[str, ...]] = ()
    process_attributes: ClassVar[Mapping[str, Any]] = {}
    replicated_options: ClassVar[Mapping[str, str]] = {}
    lockstep_forward: ClassVar[bool] = False
    checks_model: ClassVar[bool] = False
    _add_on_generators: Generators

    if TYPE_CHECKING:
        # mypy refuses to pass a class with abstract methods to add_on; an add-on is never instantiated.
        def train_step(self, batch: Any) -> Any: ...

        def test_step(self, batch: Any) -> Any: ...

    @classmethod
    def apply(cls, base_cls: type[AnyTrainer]) -> type[AnyTrainer]:
        """Return ``base_cls`` with this add-on; override it to build the class in another way.

        An override may call ``super().apply(base_cls)``, which puts the add-on outside of ``base_cls``.

        Parameters
        ----------
        base_cls : type
            A trainer class.

        Returns
        -------
        type
            A subclass of ``base_cls``.
        """
        return cast("type[AnyTrainer]", mix(cls, base_cls))

    def generator(self, name: str, *, per_rank: bool = True) -> torch.Generator:
        """Return a random generator of this run, on the trainer's device: the same object for the same name.

        It is seeded by ``seed``, the rank and ``name``, and independent of all other random streams: what draws from
        it changes nothing else. Checkpoints contain its state for each rank, and a resume continues it bitwise; on
        another number of ranks, those whose state was not saved begin with a seed of their own. What is drawn in an
        evaluation is the same in each, and moves nothing in training.

        Without ``seed=``, the seed is that of ``torch.manual_seed``, or, where nobody has called it, a random one; it
        is saved with the state.

        Parameters
        ----------
        name : str
            The add-on's own name for it, for instance "mixup". Add-ons that ask for the same name share a generator.
        per_rank : bool
            Whether each rank draws its own numbers, as for its samples. What changes gradients or weights must be the
            same on every rank: there write ``per_rank=False``, and draw equally often on each.

        Returns
        -------
        torch.Generator
            Ask for it after ``super().setup()``, when rank and device are known.

        Examples
        --------
        >>> import torch
        >>> from zae import AddOnBase
        >>> class NoiseAddon(AddOnBase):
        ...     "Add noise to each input."
        ...     layer = "loop"
        ...     def to_device(self, batch):
        ...         x, y = super().to_device(batch)
        ...         return x + 0.1 * torch.randn(x.shape, generator=self.generator("noise"), device=x.device), y
        """
        return self._open_generators().get(name, per_rank, self)

    @property
    def _generators(self) -> Generators:
        """The generators of all add-ons of this trainer; empty until one is asked for."""
        return vars(self).get("_add_on_generators") or Generators()

    def _open_generators(self) -> Generators:
        """Return the generators of all add-ons, to which those are added that are asked for from now on."""
        generators: Generators = vars(self).setdefault("_add_on_generators", Generators())
        return generators

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Restore the states of the generators when an evaluation ends; begin them at its seed, if it has one."""
        with self._open_generators().isolated(self.current_run.activity.evaluation.seed), super().evaluation_context():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Add the generators, and an entry for each add-on that declares what it keeps."""
        generators = self._generators.state_dict()
        drawn = {GENERATORS: generators} if generators else {}
        return {**super().state_dict(), **read_attributes(self), **drawn}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Check the entries of declared attributes and of generators, load the rest, and then set them."""
        generators, state = self.take(state, GENERATORS, strict=False)
        values: dict[str, Any] = {}
        for owner in attributes_by_owner(type(self)):
            entry, rest = self.take(state, owner.__name__, strict=False)
            entry = owner.adapt_state(self, entry)
            if entry is None:
                entry, rest = self.take(state, owner.__name__, strict)
            values |= {} if entry is None else check_attributes(self, owner, entry)
            state = rest
        super().load_state_dict(state, strict)
        for name, value in values.items():
            setattr(self, name, value)
        if generators:
            self._open_generators()
        self._generators.load_state_dict(generators or {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, with ``process_attributes`` at their initial values."""
        state = super().__getstate__()
        for klass in type(self).__mro__:
            state |= copy.deepcopy(klass.__dict__.get("process_attributes", {}))
        return state

    def adapt_state(self, entry: Any) -> Any:
        """Return the saved entry of this class as its attributes are to be set; override it where that differs.

        It is called for each class that declares attributes, with the entry of that class, before anything is loaded:
        the place to take the layout of an older version, and to refuse with `CheckpointMismatch` what cannot be right.
        An override does not call ``super()``.

        Parameters
        ----------
        entry : object
            A dict with a value for each declared attribute, without leading underscores; None where the state has no
            entry of this class, which is an error unless a dict is returned.

        Returns
        -------
        object
            The entry; not the same object where it is changed.
        """
        return entry

    def merge_ranks(self, entries: Sequence[Any], rank: int) -> Any:
        """Return the entry of this class with which a rank continues where another number of ranks has saved it.

        Override it where what the ranks hold can be combined, as counts can: rank 0 continues from those of all ranks,
        and the others from none. It is called for a class that overrides it, when a state of another number of ranks
        is loaded. An override does not call ``super()``.

        Parameters
        ----------
        entries : sequence of object
            The saved entry of each rank, in their order; only one where the others were not saved.
        rank : int
            The rank, of the new number of them, that continues from what is returned.

        Returns
        -------
        object
            The entry.
        """
        return entries[0]

    @staticmethod
    def take(state: Mapping[str, Any], name: str, strict: bool = True) -> tuple[Any, dict[str, Any]]:
        """Split a state into the entry of an add-on and the rest; the state itself is not changed.

        Parameters
        ----------
        state : mapping
            What ``load_state_dict`` was given.
        name : str
            The add-on's key, its class name.
        strict : bool
            Whether a missing entry is an error; otherwise it is returned as None.

        Returns
        -------
        own, rest : tuple
            The entry, and a dict of all others for ``super().load_state_dict``.

        Raises
        ------
        CheckpointMismatch
            The entry is missing.
        """
        if state.get(name) is None and strict:
            raise CheckpointMismatch(
                f"the state has no entry of {name}: it was saved without this add-on (its entries: "
                f"{', '.join(map(str, state))}); load it with strict=False to start {name} from its initial state"
            )
        return state.get(name), {key: value for key, value in state.items() if key != name}


if TYPE_CHECKING:

    class Composed(Trainer):
        """What type checkers know of a class made by ``add_on``: a trainer, with any options and attributes beside."""

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def train_step(self, batch: Any) -> Any: ...

        def test_step(self, batch: Any) -> Any: ...
