"""Composition: one class for a set of add-ons, whatever the order, or a refusal that says what to write instead."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import pickle
import pydoc
import subprocess
import sys
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest
import torch
from typing_extensions import override

import zae.addons
from zae import (
    AddOnBase,
    AddOnConflict,
    AddOnError,
    AddOnOrder,
    AddOnRequirement,
    OptionError,
    TaskError,
    Trainer,
    replaces,
    seam,
)
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon
from zae.composition.metaclass import LAYERS, add_ons_of, options_of, slots_of


class Task(Trainer):
    """Fit a line."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}

    def test_step(self, batch):
        return self.train_step(batch)


class InnerAddon(AddOnBase):
    """Write its name around the clip, near the loop."""

    layer = "loop"

    def __init__(self, *args, inner_mark="inner", **kwargs):
        super().__init__(*args, **kwargs)
        self.inner_mark = inner_mark
        self.trace = []

    def clip(self):
        self.trace.append("inner")
        super().clip()


class MiddleAddon(AddOnBase):
    """Write its name around the clip, in the middle."""

    layer = "precision"

    def clip(self):
        self.trace.append("middle")
        super().clip()


class OuterAddon(AddOnBase):
    """Write its name around the clip, far out."""

    layer = "observe"

    def clip(self):
        self.trace.append("outer")
        super().clip()


class WrappingAddon(AddOnBase):
    """Build the class by itself."""

    layer = "control"

    @classmethod
    def apply(cls, base_cls):
        class Wrapped(base_cls):
            def clip(self):
                self.trace.append("wrapping")
                super().clip()

        return Wrapped


TRACED = (InnerAddon, MiddleAddon, OuterAddon)
LOCAL = (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon)


def make(cls, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(count)]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.unwrap().parameters()])


# --------------------------------------------------------------------------------------------- a set is a class


def test_add_on_is_a_pure_function_of_a_set():
    """P-50: every order, and every way of chaining, is the same class."""
    whole = Task.add_on(*TRACED, WrappingAddon)
    for order in itertools.permutations((*TRACED, WrappingAddon)):
        assert Task.add_on(*order) is whole
        chained = Task
        for add_on in order:
            chained = chained.add_on(add_on)
        assert chained is whole
        assert Task.add_on(*order[:2]).add_on(*order[2:]) is whole


def test_the_local_add_ons_commute():
    """P-50: all orders of the add-ons that come with zae."""
    whole = Task.add_on(*LOCAL)
    assert all(Task.add_on(*order) is whole for order in itertools.permutations(LOCAL))
    layers = [LAYERS.index(a.layer) for a in add_ons_of(whole)]
    assert layers == sorted(layers, reverse=True)


def test_adding_twice_or_nothing_changes_nothing():
    """E3: the same add-on twice is one."""
    once = Task.add_on(InnerAddon)
    assert once.add_on(InnerAddon) is once
    assert Task.add_on(InnerAddon, InnerAddon) is once
    assert Task.add_on() is Task
    assert once.add_on() is once


def test_the_base_is_untouched():
    before = (Task.__mro__, Task.__doc__, Task.__name__, inspect.signature(Task), Task.clip)
    Task.add_on(*TRACED, WrappingAddon)
    assert (Task.__mro__, Task.__doc__, Task.__name__, inspect.signature(Task), Task.clip) == before
    assert add_ons_of(Task) == []


def test_the_order_runs_as_the_layers_say():
    """P-50: the same effective order and bitwise the same weights, whatever the order of the arguments."""
    results = set()
    for order in itertools.permutations((*TRACED, WrappingAddon)):
        trainer = make(Task.add_on(*order))
        trainer.run(1, batches(1))
        assert trainer.trace == ["outer", "wrapping", "middle", "inner"]
        results.add(weights(trainer).numpy().tobytes())
    assert len(results) == 1


def test_the_hand_written_twin_behaves_the_same():
    class Twin(OuterAddon, MiddleAddon, InnerAddon, Task):
        pass

    composed, twin = make(Task.add_on(*TRACED), inner_mark="x"), make(Twin, inner_mark="x")
    composed.run(2, batches())
    twin.run(2, batches())
    assert torch.equal(weights(composed), weights(twin))
    assert composed.trace == twin.trace
    assert add_ons_of(Twin) == add_ons_of(Task.add_on(*TRACED))
    assert inspect.signature(Twin) == inspect.signature(Task.add_on(*TRACED))


def test_a_wrong_hand_written_order_names_the_right_line():
    with pytest.raises(AddOnOrder, match=r"class Wrong\(OuterAddon, InnerAddon, Task\)"):

        class Wrong(InnerAddon, OuterAddon, Task):
            pass

    with pytest.raises(AddOnOrder, match=r"class Behind\(InnerAddon, Task\)"):

        class Behind(Task, InnerAddon):
            pass

    with pytest.raises(AddOnOrder, match=r"add-ons come first: class Twisted\(OuterAddon, InnerAddon, Trainer\)"):

        class Twisted(Trainer, InnerAddon, OuterAddon):
            pass


def test_a_hand_written_twin_is_checked_like_add_on():
    class First(AddOnBase):
        slot = "shared slot"

    class Second(AddOnBase):
        slot = "shared slot"

    with pytest.raises(AddOnConflict, match=r"First and Second both fill the slot 'shared slot'; keep one"):

        class Both(First, Second, Task):
            pass


def test_a_class_derived_of_a_composed_trainer():
    """The seed's spelling: ``class X(Trainer.add_on(A))`` with the steps in X."""

    class X(Trainer.add_on(InnerAddon)):
        def train_step(self, batch):
            inputs, targets = batch
            return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}

        test_step = train_step

    trainer = make(X)
    trainer.run(1, batches())
    assert trainer.trace == ["inner"] * 4
    assert X.add_on(InnerAddon) is X

    both = X.add_on(OuterAddon)
    assert both is X.add_on(OuterAddon, InnerAddon)
    assert both.__name__ == "X[OuterAddon]"
    trainer = make(both)
    trainer.run(1, batches(1))
    assert trainer.trace == ["outer", "inner"]


@pytest.mark.parametrize("written", ["composed", "by hand"])
def test_an_add_on_that_belongs_inside_of_those_there_goes_there(written):
    """P-50: an add-on put on a user's class that stands on add-ons finds its place below the user's own methods."""
    base = Task.add_on(OuterAddon, MiddleAddon)
    bases = (base,) if written == "composed" else (OuterAddon, MiddleAddon, Task)

    def clip(self):
        self.trace.append("mine")
        super(X, self).clip()

    X = type(Task)("X", bases, {"clip": clip, "__module__": __name__})  # noqa: N806
    made = X.add_on(InnerAddon)
    assert [a.__name__ for a in add_ons_of(made)] == ["OuterAddon", "MiddleAddon", "InnerAddon"]
    trainer = make(made)
    trainer.run(1, batches(1))
    assert trainer.trace == ["mine", "outer", "middle", "inner"]
    assert X.add_on(InnerAddon) is made


def test_a_subclassed_add_on_stands_for_its_base():
    class FineAMPAddon(AMPAddon):
        """Mixed precision, another default."""

        def __init__(self, *args, precision="fp32", **kwargs):
            super().__init__(*args, precision=precision, **kwargs)

    assert Task.add_on(AMPAddon, FineAMPAddon) is Task.add_on(FineAMPAddon)
    assert Task.add_on(AMPAddon).add_on(FineAMPAddon) is Task.add_on(FineAMPAddon)
    assert Task.add_on(FineAMPAddon).add_on(AMPAddon) is Task.add_on(FineAMPAddon)
    assert options_of(Task.add_on(FineAMPAddon))["precision"][0].default == "fp32"

    class Own(Task.add_on(AMPAddon)):
        pass

    assert add_ons_of(Own.add_on(FineAMPAddon)) == [FineAMPAddon]


def test_the_options_of_a_class_are_found_once_for_as_long_as_its_inits_stay():
    made = Task.add_on(AMPAddon, EMAAddon)
    assert options_of(made) is options_of(made)
    assert "precision" not in options_of(Task.add_on(EMAAddon))  # What was found for one class is not another's.

    class Own(made):
        def __init__(self, *args, width=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.width = width

    assert options_of(Own).keys() - options_of(made).keys() == {"width"}
    Own.__init__ = lambda self, *args, height, **kwargs: made.__init__(self, *args, **kwargs)
    assert options_of(Own).keys() - options_of(made).keys() == {"height"}
    with pytest.raises(OptionError, match="needs 'height'"):
        Own(torch.nn.Linear(2, 1), "cpu", mode="test")
    with pytest.raises(TypeError):
        options_of(made)["precision"] = None
    assert Own.__name__ in [owner.__name__ for _, owner in options_of(Own).values()]


# ------------------------------------------------------------------------------------------------ apply(base_cls)


def test_apply_may_return_a_class_of_mixins():
    class MixedAddon(AddOnBase):
        """The way of seed 003: type(name, (cls, base_cls), {})."""

        @classmethod
        def apply(cls, base_cls):
            return type(f"{base_cls.__name__}Mixed", (cls, base_cls), {})

        def clip(self):
            self.trace.append("mixed")
            super().clip()

    for order in itertools.permutations((InnerAddon, MixedAddon, OuterAddon)):
        made = Task.add_on(*order)
        assert made is Task.add_on(InnerAddon, MixedAddon, OuterAddon)
        trainer = make(made)
        trainer.run(1, batches(1))
        assert trainer.trace == ["outer", "mixed", "inner"]
    assert [a.__name__ for a in add_ons_of(made)] == ["OuterAddon", "MixedAddon", "InnerAddon"]


def test_apply_may_leave_the_mixing_to_super():
    """An override that only looks on, or adds to the class afterwards, need not know how classes are made."""

    class LookingAddon(AddOnBase):
        """Look at what it is put on."""

        layer = "loop"

        @classmethod
        def apply(cls, base_cls):
            made = super().apply(base_cls)
            made.looked_at = base_cls.__name__
            return made

        def clip(self):
            super().clip()
            self.clipped = True

    made = Task.add_on(LookingAddon, AMPAddon)
    assert made.looked_at == "Task"
    assert made is Task.add_on(AMPAddon, LookingAddon)
    assert [a.__name__ for a in add_ons_of(made)] == ["AMPAddon", "LookingAddon"]
    assert not hasattr(Task, "looked_at")


def test_apply_that_adds_other_add_ons_leaves_their_class_alone():
    class BundleAddon(AddOnBase):
        """Two in one."""

        @classmethod
        def apply(cls, base_cls):
            return base_cls.add_on(InnerAddon)

    made = Task.add_on(BundleAddon)
    assert {a.__name__ for a in add_ons_of(made)} == {"BundleAddon", "InnerAddon"}
    assert add_ons_of(Task.add_on(InnerAddon)) == [InnerAddon]


def test_an_applied_add_on_may_be_required_and_may_require():
    class NeededAddon(AddOnBase):
        """Applied by itself."""

        @classmethod
        def apply(cls, base_cls):
            return type("Needed", (base_cls,), {})

    class NeedyAddon(AddOnBase):
        """Applied by itself, and needs another one outside of it."""

        layer = "loop"
        requires = (NeededAddon,)

        @classmethod
        def apply(cls, base_cls):
            return type("Needy", (cls, base_cls), {})

    assert Task.add_on(NeedyAddon, NeededAddon) is Task.add_on(NeededAddon, NeedyAddon)
    with pytest.raises(AddOnRequirement, match=r"NeedyAddon needs NeededAddon, which is not there"):
        Task.add_on(NeedyAddon)


@pytest.mark.parametrize("returned", [None, int, "Task", Task], ids=repr)
def test_apply_that_returns_something_else_is_refused(returned):
    class WrongAddon(AddOnBase):
        @classmethod
        def apply(cls, base_cls):
            return returned

    before = dict(Task.__dict__)
    with pytest.raises(AddOnError, match=r"WrongAddon\.apply\(base_cls\) returned .*; return a subclass of base_cls"):
        Task.add_on(WrongAddon)
    assert {k: v for k, v in Task.__dict__.items() if k != "_compositions"}.items() <= before.items()


def test_apply_must_be_a_classmethod():
    with pytest.raises(AddOnError, match=r"WrongAddon.apply is no classmethod; write @classmethod def apply"):

        class WrongAddon(AddOnBase):
            def apply(self, base_cls):
                return base_cls


# ------------------------------------------------------------------------- slots, needs, relations, options, names


def test_slots():
    class FirstAddon(AddOnBase):
        slot = "wheel"

    class SecondAddon(AddOnBase):
        slot = "wheel"

    with pytest.raises(AddOnConflict, match=r"FirstAddon and SecondAddon both fill the slot 'wheel'; keep one"):
        Task.add_on(SecondAddon, FirstAddon)
    with pytest.raises(AddOnConflict, match=r"keep one"):
        Task.add_on(SecondAddon).add_on(FirstAddon)
    assert slots_of(Task.add_on(AMPAddon, SecondAddon)) == {"precision": AMPAddon, "wheel": SecondAddon}


def test_requirements_give_the_line_to_write():
    class NeedyAddon(AddOnBase):
        requires = (InnerAddon, "MiddleAddon")

    with pytest.raises(
        AddOnRequirement,
        match=r"NeedyAddon needs InnerAddon, which is not there; write \.add_on\(InnerAddon, NeedyAddon\)",
    ):
        Task.add_on(NeedyAddon)
    with pytest.raises(AddOnRequirement, match=r"needs MiddleAddon"):
        Task.add_on(NeedyAddon, InnerAddon)
    assert len(add_ons_of(Task.add_on(NeedyAddon, InnerAddon, MiddleAddon))) == 3
    assert len(add_ons_of(Task.add_on(InnerAddon, MiddleAddon).add_on(NeedyAddon))) == 3


def test_relations_decide_within_a_layer():
    class AAddon(AddOnBase):
        outside = ("BAddon",)

    class BAddon(AddOnBase):
        pass

    class CAddon(AddOnBase):
        inside = (BAddon,)

    for order in itertools.permutations((AAddon, BAddon, CAddon)):
        assert add_ons_of(Task.add_on(*order)) == [AAddon, BAddon, CAddon]


def test_relations_that_contradict_each_other_are_refused():
    class AAddon(AddOnBase):
        inside = ("BAddon",)

    class BAddon(AddOnBase):
        inside = (AAddon,)

    class CAddon(AddOnBase):
        layer = "loop"
        outside = (InnerAddon, "OuterAddon")

    with pytest.raises(
        AddOnOrder, match=r"no order fulfils what AAddon, BAddon ask for: AAddon .* 'observe', inside BAddon;"
    ):
        Task.add_on(AAddon, BAddon)
    with pytest.raises(AddOnOrder, match=r"CAddon is in layer 'loop', outside InnerAddon, outside OuterAddon"):
        Task.add_on(CAddon, OuterAddon)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"layer": "outermost"}, "WrongAddon.layer is 'outermost'; it must be one of model, loop"),
        ({"inside": "AMPAddon"}, r"WrongAddon.inside is 'AMPAddon'; .*: inside = \('AMPAddon',\)"),
        ({"outside": AMPAddon}, r"WrongAddon.outside is AMPAddon; .*: outside = \(AMPAddon,\)"),
        ({"requires": (3,)}, "WrongAddon.requires is .* it must be a tuple of add-ons or their names"),
        ({"slot": 3}, "WrongAddon.slot is 3; it must be a name, or None"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused(declared, message):
    with pytest.raises(AddOnError, match=message):
        type(Task)("WrongAddon", (AddOnBase,), declared)


def test_two_owners_of_one_option_are_refused():
    class OneAddon(AddOnBase):
        def __init__(self, *args, decay=1, **kwargs):
            super().__init__(*args, **kwargs)

    class Own(Task):
        def __init__(self, *args, decay=1, **kwargs):
            super().__init__(*args, **kwargs)

    with pytest.raises(AddOnConflict, match=r"both have an option 'decay'; rename one of them, or put it into a base"):
        Task.add_on(OneAddon, EMAAddon)
    with pytest.raises(AddOnConflict, match=r"EMAAddon and Own both have an option 'decay'"):
        Own.add_on(EMAAddon)
    with pytest.raises(AddOnConflict, match=r"EMAAddon and Own both have an option 'decay'"):

        class Twin(EMAAddon, Own):
            pass


def test_an_option_of_a_common_base_is_shared():
    class KeyAddon(AddOnBase):
        def __init__(self, *args, key=0, **kwargs):
            super().__init__(*args, **kwargs)
            self.key = key

    class LeftAddon(KeyAddon):
        pass

    class RightAddon(KeyAddon):
        pass

    trainer = make(Task.add_on(LeftAddon, RightAddon), key=5)
    assert trainer.key == 5
    assert options_of(type(trainer))["key"][1] is KeyAddon


def test_a_class_above_an_add_on_may_give_its_option_another_default():
    class Fixed(EMAAddon, Task):
        def __init__(self, *args, decay=0.5, **kwargs):
            super().__init__(*args, decay=decay, **kwargs)

    assert make(Fixed).decay == 0.5
    assert make(Fixed, decay=0.25).decay == 0.25


def test_two_add_ons_of_one_name_are_refused():
    def made(mark):
        return type(Task)("TwinAddon", (AddOnBase,), {"mark": mark, "__module__": __name__})

    with pytest.raises(AddOnConflict, match=r"two add-ons are called TwinAddon .*, and their states would share a key"):
        Task.add_on(made(1), made(2))


def test_what_is_no_add_on_is_refused():
    """E3"""
    with pytest.raises(AddOnError, match=r"Odd is not an add-on; write class Odd\(AddOnBase\): ..., and Task.add_on"):
        Task.add_on(type("Odd", (), {}))
    with pytest.raises(AddOnError, match=r"int is not an add-on; write class MyAddon\(AddOnBase\)"):
        Task.add_on(int)
    with pytest.raises(AddOnError, match=r"Task is not an add-on; write class MyAddon\(AddOnBase\)"):
        Trainer.add_on(Task)
    with pytest.raises(AddOnError, match=r"AddOnBase is the base of all add-ons"):
        Task.add_on(AddOnBase)
    with pytest.raises(AddOnError, match=r"one by one, not in a list; write add_on\(A, B\)"):
        Task.add_on([AMPAddon, EMAAddon])
    with pytest.raises(AddOnError, match=r"takes classes, and got an instance"):
        Task.add_on(object())
    with pytest.raises(AddOnError, match=r"AMPAddon is an add-on, not a trainer; write Task.add_on\(AMPAddon, ...\)"):
        AMPAddon.add_on(EMAAddon)
    with pytest.raises(AddOnError, match=r"AMPAddon is an add-on and does not run alone"):
        AMPAddon(torch.nn.Linear(1, 1))


def test_an_abc_that_claims_a_task_does_not_fool_add_on():
    class VirtualAddon(AddOnBase):
        def clip(self):
            super().clip()

    VirtualAddon.register(Task)
    assert VirtualAddon in Task.add_on(VirtualAddon).__mro__


# ------------------------------------------------------------------------------------------------- super() and seams


class _Recorder:
    """What each kind of override without super() looks like."""

    @staticmethod
    def by_function():
        def clip(self):
            pass

        return {"clip": clip}

    @staticmethod
    def by_context():
        @contextlib.contextmanager
        def forward_context(self):
            yield

        return {"forward_context": forward_context}

    @staticmethod
    def by_property():
        return {"should_stop": property(lambda self: False)}

    @staticmethod
    def by_lambda():
        return {"clip": lambda self: None}

    @staticmethod
    def by_staticmethod():
        return {"clip": staticmethod(lambda: None)}

    @staticmethod
    def by_classmethod():
        return {"clip": classmethod(lambda cls: None)}

    @staticmethod
    def by_partialmethod():
        return {"clip": functools.partialmethod(lambda self, norm: None, 1.0)}

    @staticmethod
    def by_another_super():
        def clip(self):
            super(AddOnBase, self).unscale()

        return {"clip": clip}

    @staticmethod
    def by_name_of_the_base():
        def clip(self):
            Trainer.clip(self)

        return {"clip": clip}


KINDS = [name for name in vars(_Recorder) if name.startswith("by_")]


class _Ends:
    """Methods that call ``super()`` and give back nothing, or something in one way or another."""

    @staticmethod
    def nothing_by_itself(self):
        super().optimizer_step()

    @staticmethod
    def nothing_by_a_bare_return(self):
        for _ in range(2):
            with self.batch_context():
                super().optimizer_step()
        return

    @staticmethod
    def nothing_in_a_try(self):
        try:
            super().optimizer_step()
        finally:
            self.seen = True

    @staticmethod
    def something_now_and_then(self):
        stepped = super().optimizer_step()
        if stepped:
            return True

    @staticmethod
    def something_in_one_branch(self):
        return super().optimizer_step() if self.parameters else None

    @staticmethod
    def something_in_the_other_branch(self):
        return None if self.parameters else super().optimizer_step()

    @staticmethod
    def something_in_a_context(self):
        with self.batch_context():
            return super().optimizer_step()

    @staticmethod
    def something_before_a_finally(self):
        try:
            return super().optimizer_step()
        finally:
            self.seen = True

    @staticmethod
    def something_unless_it_raises(self):
        super().optimizer_step()
        raise NotImplementedError


@pytest.mark.parametrize("base", [AddOnBase, Task])
@pytest.mark.parametrize("kind", [name for name in vars(_Ends) if "thing" in name])
def test_what_a_seam_gives_is_given_on(kind, base):
    """F-E: a step whose result is forgotten would count as skipped, and neither scheduler nor average would move."""
    namespace = {"optimizer_step": getattr(_Ends, kind)}
    if kind.startswith("something"):
        assert type("KeepingAddon", (base,), namespace).optimizer_step is getattr(_Ends, kind)
        return
    error = AddOnError if base is AddOnBase else TaskError
    with pytest.raises(
        error, match=r"LosingAddon.optimizer_step calls super\(\).* write return super\(\).optimizer_step"
    ):
        type("LosingAddon", (base,), namespace)


def test_a_seam_that_gives_nothing_needs_no_return():
    class QuietAddon(AddOnBase):
        def clip(self):
            super().clip()

    class Silent(Task):
        def metric_on_epoch_end(self):
            super().metric_on_epoch_end()

    model = torch.nn.Linear(1, 1)
    trainer = Silent.add_on(QuietAddon)(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer.run(1, [(torch.ones(2, 1), torch.ones(2, 1))])["step"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_seam_overridden_without_super_is_refused(kind):
    namespace = getattr(_Recorder, kind)()
    name = next(iter(namespace))
    call = rf"super\(\).{name}" + ("" if name == "should_stop" else r"\(\.\.\.\)")
    with pytest.raises(AddOnError, match=rf"LossyAddon.{name} overrides a seam without calling super\(\), and so drops "
                                         rf"what is inside of it; call {call}, or mark .* @zae.replaces"):  # fmt: skip
        type(Task)("LossyAddon", (AddOnBase,), namespace)


def test_super_is_found_wherever_it_is_called():
    def plain(function):
        def wrapper(self):
            return function(self)

        return wrapper

    class FineAddon(AddOnBase):
        def clip(self):
            def really():
                super(FineAddon, self).clip()

            really()

        @contextlib.contextmanager
        def forward_context(self):
            with super().forward_context():
                yield

        @property
        def should_stop(self):
            return super().should_stop

        @functools.wraps(Trainer.zero_grad, assigned=("__doc__",), updated=())
        def zero_grad(self):
            super().zero_grad()

        @torch.no_grad()
        def unscale(self):
            [super(FineAddon, self).unscale() for _ in range(1)]

        @plain
        def optimizer_step(self):
            return super().optimizer_step()

    trainer = make(Task.add_on(FineAddon))
    trainer.run(1, batches(1))
    assert trainer.progress_checker.step == 1


@pytest.mark.parametrize("kind", ["function", "property", "contextmanager", "outside contextmanager", "classmethod"])
def test_replaces_is_allowed(kind):
    namespaces = {
        "function": {"clip": replaces(lambda self: None)},
        "property": {"should_stop": replaces(property(lambda self: False))},
        "contextmanager": {"forward_context": contextlib.contextmanager(replaces(_empty_context))},
        "outside contextmanager": {"forward_context": replaces(contextlib.contextmanager(_empty_context))},
        "classmethod": {"clip": replaces(classmethod(lambda cls: None))},
    }
    add_on = type(Task)("WholeAddon", (AddOnBase,), namespaces[kind])
    trainer = make(Task.add_on(add_on))
    trainer.run(1, batches(1))
    assert trainer.progress_checker.step == 1


def _empty_context(self):
    yield


def test_a_plain_task_may_override_freely_and_one_above_add_ons_may_not():
    class Free(Task):
        def clip(self):
            pass

        def optimizer_step(self):
            for optimizer in self._optimizers.values():
                optimizer.step()
            return True

    make(Free.add_on(AMPAddon, InnerAddon)).run(1, batches(1))
    with pytest.raises(TaskError, match=r"Above.clip .* drops what InnerAddon does there; call super\(\).clip"):

        class Above(Task.add_on(InnerAddon)):
            def clip(self):
                pass

    class Mixin:
        def clip(self):
            pass

    with pytest.raises(TaskError, match=r"Mixin.clip .* drops what InnerAddon does there"):

        class Mixed(Mixin, InnerAddon, Task):
            pass


def test_a_seam_that_an_add_on_brings_is_a_seam():
    class BringingAddon(AddOnBase):
        @seam
        def weave(self):
            return "thread"

    with pytest.raises(AddOnError, match=r"LossyAddon.weave overrides a seam without calling super\(\)"):

        class LossyAddon(BringingAddon):
            def weave(self):
                return ""


@pytest.mark.parametrize("name", ["run", "run_epoch", "run_batch", "add_on", "evaluate", "inference"])
def test_the_loop_is_not_for_add_ons(name):
    with pytest.raises(
        AddOnError, match=f"LoopAddon overrides {name}, which is the loop itself; override a seam insid"
    ):
        type(Task)("LoopAddon", (AddOnBase,), {name: lambda self, *args: None})


# ------------------------------------------------------------------------------------------------------ method names


@pytest.mark.parametrize("kind", ["function", "property", "contextmanager", "private"])
def test_an_override_of_nothing_is_refused(kind):
    def backwards(self, loss): ...

    values = {
        "function": ("backwards", override(backwards)),
        "property": ("backwards", property(override(backwards))),
        "contextmanager": ("backwards", contextlib.contextmanager(override(backwards))),
        "private": ("_set_upp", override(backwards)),
    }
    name, value = values[kind]
    with pytest.raises(TaskError, match=f"X.{name} is marked @override, but no base has '{name}'"):
        type(Task)("X", (Task,), {name: value})
    type(Task)("X", (Task,), {"backward": override(lambda self, loss: loss.backward())})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trian_step", "train_step"),
        ("test_stp", "test_step"),
        ("backwards", "backward"),
        ("optimiser_step", "optimizer_step"),
        ("on_epoch_ends", "on_epoch_end"),
        ("forward_contexts", "forward_context"),
        ("set_up", "setup"),
        ("tear_down", "teardown"),
        ("metrics_on_epoch_end", "metric_on_epoch_end"),
    ],
)
@pytest.mark.parametrize("base", [Task, AddOnBase])
def test_a_misspelt_hook_is_refused(name, meant, base):
    """P-35's kin: what would never be called is said at class creation."""
    with pytest.raises(TaskError, match=f"X.{name} would never be called; did you mean '{meant}'?"):
        type(Task)("X", (base,), {name: lambda self, *args: None})


@pytest.mark.parametrize("name", sorted(zae.composition.foreign_names.FOREIGN_HOOKS))
def test_a_foreign_hook_is_refused(name):
    _, here = zae.composition.foreign_names.FOREIGN_HOOKS[name]
    with pytest.raises(TaskError) as caught:
        type(Task)("X", (Task,), {name: lambda self, batch: None})
    assert f"X.{name} would never be called" in str(caught.value)
    assert here in str(caught.value) or here.split("(")[0] in str(caught.value)


def test_a_misspelt_hook_in_a_plain_mixin_is_refused():
    class Hooks:
        def on_train_epoch_end(self): ...

    with pytest.raises(
        TaskError, match=r"Hooks.on_train_epoch_end would never be called; it is Lightning's name; here"
    ):

        class Mixed(Hooks, Task):
            pass


def test_a_helper_that_the_class_calls_itself_is_no_mistake():
    class Helpful(Task):
        def compute_loss(self, batch):
            return super().train_step(batch)

        def train_step(self, batch):
            return self.compute_loss(batch)

        def norm_of(self): ...

    make(Helpful).run(1, batches(1))


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        ({"clip": 0.5}, r"X.clip = 0.5 hides the trainer's method clip\(\); give it another name"),
        ({"log": []}, r"X.log = \[\] hides the trainer's method log\(\)"),
        ({"metrics": {}}, "hides the trainer's property 'metrics'; give it another name"),
        ({"should_stop": lambda self: False}, "X.should_stop is a property of the trainer; put @property above it"),
        (
            {"clip": property(lambda self: None)},
            "X.clip is a method of the trainer, and is called; take @property away",
        ),
        ({"forward_context": _empty_context}, "X.forward_context yields, .* put @contextlib.contextmanager above it"),
    ],
)
def test_an_attribute_of_the_wrong_kind_is_refused(namespace, message):
    with pytest.raises(TaskError, match=message):
        type(Task)("X", (Task,), namespace)


def test_async_and_yielding_steps_are_refused():
    with pytest.raises(TaskError, match=r"X.train_step is async, and the loop does not await it"):

        class X(Task):
            async def train_step(self, batch): ...

    with pytest.raises(TaskError, match=r"Y.train_step yields; return the dict instead"):

        class Y(Task):
            def train_step(self, batch):
                yield {"loss": 0}


def test_a_signature_that_the_loop_cannot_call_is_refused():
    message = (
        r"X.train_step\(self, batch, batch_idx\) cannot take what the loop gives it; write def train_step\(self, b"
    )
    with pytest.raises(TaskError, match=message):

        class X(Task):
            def train_step(self, batch, batch_idx): ...

    with pytest.raises(AddOnError, match=r"write def logging\(self, step_dict, weight=1\)"):

        class NarrowAddon(AddOnBase):
            def logging(self, step_dict):
                super().logging(step_dict)

    class Wide(Task):
        def train_step(self, batch, extra=None):
            return super().train_step(batch)

    make(Wide).run(1, batches(1))


# ------------------------------------------------------------------------------------------------------ __init__


def _addon(init):
    return type(Task)("InitAddon", (AddOnBase,), {"__init__": init})


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda self, alpha=1, *args, **kwargs: None, r"takes 'alpha' by position, .*; write def __init__"),
        (lambda self, *, alpha: None, r"does not let the trainer's own arguments pass; write .*self, \*args, alpha, "),
        (lambda self: None, "does not let the trainer's own arguments pass"),
        (lambda self, *args, alpha=1, **kwargs: None, r"does not call super\(\).__init__\(\*args, \*\*kwargs\)"),
    ],
)  # fmt: skip
def test_an_add_ons_init_that_swallows_is_refused(init, message):
    with pytest.raises(AddOnError, match=f"InitAddon.__init__ {message}"):
        _addon(init)


@pytest.mark.parametrize("default", [[], {}, set()], ids=repr)
def test_a_mutable_default_of_an_option_is_refused(default):
    with pytest.raises(AddOnError, match=r"that all trainers would share; write tags=None, or a tuple"):

        class TagAddon(AddOnBase):
            def __init__(self, *args, tags=default, **kwargs):
                super().__init__(*args, **kwargs)


def test_a_forgotten_super_init_is_said_in_words():
    class Forgetful(Task):
        def __init__(self, *args, **kwargs):
            self.ready = True

    with pytest.raises(TaskError, match=r"Forgetful.__init__ does not call super\(\).__init__, .*; write super\(\)"):
        make(Forgetful)
    with pytest.raises(TaskError, match=r"Above.__init__ overrides __init__ without calling super\(\)"):

        class Above(Task.add_on(InnerAddon)):
            def __init__(self, *args, **kwargs):
                Trainer.__init__(self, *args, **kwargs)

    @dataclass
    class Data(Task):
        width: int = 3

    with pytest.raises(TaskError, match=r"Data.__init__ does not call super\(\).__init__"):
        Data(width=4)


def test_a_mixin_behind_trainer_is_refused():
    class Named:
        def __init__(self, *args, name="", **kwargs):
            super().__init__(*args, **kwargs)
            self.name = name

    with pytest.raises(AddOnOrder, match=r"Named.__init__ would never run; name it first: class X\(Named, ...\)"):

        class X(Task, Named):
            pass

    class Y(Named, Task):
        pass

    assert make(Y, name="y").name == "y"
    assert make(Y.add_on(InnerAddon), name="z").name == "z"


def test_an_attribute_set_by_init_that_hides_a_method_is_refused():
    class Logged(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.log = []

    class Measured(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.metrics = {}

    with pytest.raises(TaskError, match=r"Logged.__init__ sets self.log = list, which hides the method log\(\); give"):
        make(Logged)
    with pytest.raises(
        TaskError, match=r"Measured.__init__ sets self.metrics, which is a property of the trainer; give"
    ):
        make(Measured)


def test_tasks_with_an_init_of_their_own():
    """Options of a task: keyword-only, positional, supplied by the task itself, with and without ``**kwargs``."""

    class KeywordOnly(Task):
        def __init__(self, *, width, **kwargs):
            super().__init__(torch.nn.Linear(width, 1), **kwargs)

    class Positional(Task):
        def __init__(self, width, *args, **kwargs):
            super().__init__(torch.nn.Linear(width, 1), *args, **kwargs)

    class Closed(Task):
        def __init__(self, model, rate=0.1):
            super().__init__(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=rate), log_bar=False)

    class After(Task):
        def __init__(self, model, *args, width=1, **kwargs):
            super().__init__(model, *args, **kwargs)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    for add_ons in ((), (InnerAddon,), (EMAAddon, InnerAddon)):
        keyword, positional = KeywordOnly.add_on(*add_ons), Positional.add_on(*add_ons)
        closed, after = Closed.add_on(*add_ons), After.add_on(*add_ons)
        keyword(width=3, device="cpu", optimizer=sgd, log_bar=False).run(1, batches(1))
        positional(3, "cpu", optimizer=sgd, log_bar=False).run(1, batches(1))
        closed(torch.nn.Linear(3, 1), 0.5).run(1, batches(1))
        after(torch.nn.Linear(3, 1), "cpu", "train", sgd, width=2, log_bar=False).run(1, batches(1))
        with pytest.raises(OptionError, match=r"KeywordOnly.* takes 0 positional arguments .* and got 1"):
            keyword(torch.nn.Linear(3, 1))
        with pytest.raises(OptionError, match=r"needs 'width'"):
            keyword(device="cpu")
        with pytest.raises(OptionError, match=r"unknown argument 'device' for Closed"):
            closed(torch.nn.Linear(3, 1), device="cpu")
        with pytest.raises(OptionError, match=r"needs 'model'; write|needs 'model', an option of"):
            Task.add_on(*add_ons)(device="cpu")


def test_an_option_taken_out_of_kwargs_is_to_be_declared():
    class Popping(Task):
        def __init__(self, *args, **kwargs):
            self.alpha = kwargs.pop("alpha", 1.0)
            super().__init__(*args, **kwargs)

    with pytest.raises(OptionError, match=r"write def __init__\(self, \*args, alpha=..., \*\*kwargs\) there"):
        make(Popping, alpha=2.0)


def test_generic_and_abstract_tasks():
    Batch = TypeVar("Batch")

    class Typed(Trainer, Generic[Batch]):
        def train_step(self, batch: Batch):
            return Task.train_step(self, batch)

        def test_step(self, batch: Batch):
            return Task.train_step(self, batch)

    make(Typed).run(1, batches(1))
    make(Typed[int]).run(1, batches(1))
    make(Typed.add_on(InnerAddon)).run(1, batches(1))

    class Derived(Typed[tuple]):
        pass

    make(Derived.add_on(InnerAddon)).run(1, batches(1))

    class Shape(ABC):
        @abstractmethod
        def loss_of(self, batch): ...

    class Abstract(Shape, Task):
        pass

    with pytest.raises(
        TypeError, match=r"Abstract cannot be instantiated: it has no loss_of. Write:[\s\S]*def loss_of"
    ):
        make(Abstract)


def test_another_metaclass_is_pythons_own_refusal():
    class Meta(type):
        pass

    class Other(metaclass=Meta):
        pass

    with pytest.raises(TypeError, match=r"metaclass conflict"):

        class Mixed(Task, Other):
            pass


def test_an_init_that_loses_what_it_was_given_is_refused():
    """E1: never swallowed by ``**kwargs``."""
    with pytest.raises(
        AddOnError, match=r"LossyAddon.__init__ takes \*\*kwargs and hands them on to nobody, .* lost; wri"
    ):

        class LossyAddon(AddOnBase):
            def __init__(self, *args, alpha=1, **kwargs):
                super().__init__(*args)
                self.alpha = alpha

    with pytest.raises(TaskError, match=r"Lossy.__init__ takes \*args and hands them on to nobody"):

        class Lossy(Task):
            def __init__(self, *args, **kwargs):
                super().__init__(**kwargs)


@pytest.mark.parametrize("name", ["_calls", "_ready", "_position", "_set_up", "_optimizers"])
@pytest.mark.parametrize("base", [Task, AddOnBase])
def test_the_trainers_own_attributes_are_not_for_others(base, name):
    namespace = {}
    code = (
        f"def __init__(self, *args, **kwargs):\n    super(cls, self).__init__(*args, **kwargs)\n    self.{name} = 0\n"
    )
    exec(code, namespace)
    with pytest.raises(TaskError, match=f"X.__init__ sets self.{name}, which the trainer keeps for itself; rename it"):
        type(Task)("X", (base,), {"__init__": namespace["__init__"]})


def test_names_that_two_classes_mean_as_their_own_are_refused():
    """Two add-ons, or an add-on and a task, with one helper, one method or one attribute would undo each other."""

    class OneAddon(AddOnBase):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._count = 0

        def _helper(self): ...

        def report(self): ...

    class TwoAddon(AddOnBase):
        def _helper(self): ...

    class ThreeAddon(AddOnBase):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._count = 7

    class Reporting(Task):
        def report(self): ...

    class Layered(Task):
        layer = 3

    with pytest.raises(
        AddOnConflict, match="TwoAddon and OneAddon both have a '_helper', and the one would take the place"
    ):
        Task.add_on(OneAddon, TwoAddon)
    with pytest.raises(AddOnConflict, match="ThreeAddon and OneAddon both have a '_count'"):
        Task.add_on(OneAddon, ThreeAddon)
    with pytest.raises(AddOnConflict, match=r"OneAddon and Reporting both have a 'report', .*; rename it in Reporting"):
        Reporting.add_on(OneAddon)
    with pytest.raises(AddOnConflict, match=r"both have a 'layer', .*; rename it in Layered"):
        Layered.add_on(InnerAddon)

    class PoliteAddon(AddOnBase):
        def report(self):
            return super().report()

    class Above(Task.add_on(OneAddon)):
        def _helper(self): ...

    assert Reporting.add_on(PoliteAddon).report is PoliteAddon.report
    assert Above.add_on(InnerAddon)._helper is Above._helper


def test_a_replaced_seam_leaves_out_nobodys_work():
    class WholeAddon(AddOnBase):
        layer = "control"

        @replaces
        def clip(self): ...

    class Clipping(Task):
        def clip(self): ...

    with pytest.raises(
        AddOnConflict, match="WholeAddon replaces clip, and so leaves out what MiddleAddon does there; use"
    ):
        Task.add_on(MiddleAddon, WholeAddon)
    with pytest.raises(AddOnConflict, match="WholeAddon replaces clip, and so leaves out what Clipping does there"):
        Clipping.add_on(WholeAddon)
    trainer = make(Task.add_on(WholeAddon))
    trainer.run(1, batches(1))


def test_an_add_on_does_not_take_the_tasks_step_away():
    for name in ("train_step", "test_step"):
        with pytest.raises(AddOnError, match=rf"X.{name} overrides the task's own step without calling super\(\)"):
            type(Task)("X", (AddOnBase,), {name: lambda self, batch: {}})

    class ScaledAddon(AddOnBase):
        def train_step(self, batch):
            return {"loss": super().train_step(batch)["loss"] * 2}

    make(Task.add_on(ScaledAddon)).run(1, batches(1))


@pytest.mark.parametrize("bases", [(Task, torch.nn.Module), (torch.nn.Module, Task)], ids=["after", "before"])
def test_a_trainer_is_no_module(bases):
    with pytest.raises(
        TaskError, match=r"Both is a torch.nn.Module and a Trainer, and cannot be both; derive from Trainer"
    ):
        type(Task)("Both", bases, {})


def test_an_add_on_stands_in_one_place():
    with pytest.raises(
        AddOnError, match=r"BothAddon derives from InnerAddon, OuterAddon, which belong in different places"
    ):

        class BothAddon(InnerAddon, OuterAddon): ...


# ----------------------------------------------------------------------------------- what the class says of itself


def test_name_and_repr():
    made = Task.add_on(AMPAddon, StateManagerAddon)
    assert made.__name__ == made.__qualname__ == "Task[StateManagerAddon, AMPAddon]"
    assert repr(made) == f"<class '{__name__}.Task[StateManagerAddon, AMPAddon]'>"
    trainer = make(Task.add_on(AMPAddon))
    assert repr(trainer) == "Task[AMPAddon](model=Linear, device=cpu, mode=train, epoch=0, step=0)"


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(LOCAL, 2)), ids=lambda pair: "-".join(a.__name__ for a in pair)
)
def test_the_signature_is_what_is_accepted(pair, tmp_path):
    """F-B6: ``inspect.signature`` of every pair: each option is taken, and nothing else is."""
    made = Task.add_on(*pair)
    parameters = inspect.signature(made).parameters
    own = {n for a in pair for n, p in inspect.signature(a.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY}
    core = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert set(parameters) == own | core
    assert list(parameters)[:5] == ["model", "device", "mode", "optimizer", "scheduler"]
    values = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    values |= {"model": torch.nn.Linear(3, 1), "device": "cpu", "mode": "test"}
    if "save_path" in parameters:
        values["save_path"] = tmp_path / "run"
    assert set(values) == set(parameters)
    made(**values)
    with pytest.raises(OptionError, match=r"unknown argument 'nonsense_zzz'"):
        made(**values, nonsense_zzz=1)


def test_help_lists_the_add_ons():
    made = Task.add_on(AMPAddon, StateManagerAddon)
    text = pydoc.render_doc(made, renderer=pydoc.plaintext)
    for add_on in (AMPAddon, StateManagerAddon):
        line = f"- {add_on.__name__}: {inspect.getdoc(add_on).splitlines()[0]}"
        assert line in made.__doc__
        assert line in text
    assert "Fit a line." in made.__doc__
    assert "precision: str | Sequence[str] = 'auto'" in text.replace("'str | Sequence[str]'", "str | Sequence[str]")
    assert "save_path" in text.split("\n\n")[1]


def test_a_class_without_a_docstring_has_one_line_all_the_same():
    class Bare(Trainer):
        pass

    class BareAddon(AddOnBase):
        pass

    assert Bare.add_on(BareAddon).__doc__.splitlines()[0] == "Bare with add-ons, outermost first:"


# ---------------------------------------------------------------------------------------------------- pickling


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_classes_and_instances_pickle(protocol):
    """P-38"""
    for made in (Task, Task.add_on(AMPAddon, EMAAddon), Task.add_on(*TRACED, WrappingAddon)):
        assert pickle.loads(pickle.dumps(made, protocol)) is made
    trainer = make(Task.add_on(InnerAddon, EMAAddon, WrappingAddon))
    trainer.run(1, batches())
    again = pickle.loads(pickle.dumps(trainer, protocol))
    assert type(again) is type(trainer)
    assert torch.equal(weights(again), weights(trainer))
    assert again.progress_checker == trainer.progress_checker
    again.run(1, batches())
    trainer.run(1, batches())
    assert torch.equal(weights(again), weights(trainer))


def test_deepcopy():
    """P-38"""
    made = Task.add_on(*TRACED)
    assert copy.deepcopy(made) is made
    assert copy.copy(made) is made
    trainer = make(made)
    again = copy.deepcopy(trainer)
    trainer.run(1, batches())
    assert not torch.equal(weights(again), weights(trainer))
    again.run(1, batches())
    assert torch.equal(weights(again), weights(trainer))


def _in_another_process(trainer, cls, queue):
    trainer.run(1, batches())
    queue.put(
        (type(trainer) is cls, cls is Task.add_on(InnerAddon, EMAAddon, WrappingAddon), weights(trainer).tolist())
    )


def test_a_composed_trainer_travels_to_a_spawned_process():
    """P-38"""
    cls = Task.add_on(InnerAddon, EMAAddon, WrappingAddon)
    trainer, twin = make(cls), make(cls)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(trainer, cls, queue))
    process.start()
    same_class, is_cached, result = queue.get(timeout=60)
    process.join(60)
    assert (process.exitcode, same_class, is_cached) == (0, True, True)
    twin.run(1, batches())
    assert result == weights(twin).tolist()


def test_a_class_made_in_a_function_does_not_pickle_and_says_its_name():
    """P-38: the object that cannot travel is named."""

    class Local(Task):
        pass

    for made in (Local, Local.add_on(InnerAddon)):
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"Local"):
            pickle.dumps(made)


# -------------------------------------------------------------------------------------------------------- the cache


def test_the_cache_keeps_no_class_alive():
    class LocalAddon(AddOnBase):
        def clip(self):
            super().clip()

    class Local(Task):
        pass

    made = (Task.add_on(LocalAddon), Local.add_on(LocalAddon, EMAAddon), Local.add_on(WrappingAddon), LocalAddon, Local)
    make(made[0]).run(1, batches(1))
    with pytest.raises(OptionError):
        make(made[1], nonsense_zzz=1)
    seen = [weakref.ref(cls) for cls in made]
    del made, LocalAddon, Local
    gc.collect()  # The composed classes, and with them the cache's keys, which hold the add-ons;
    gc.collect()  # then these.
    assert [ref() for ref in seen] == [None] * 5


def test_the_cache_keeps_what_is_in_use():
    made = Task.add_on(OuterAddon, EMAAddon)
    number = id(made)
    gc.collect()
    assert id(Task.add_on(EMAAddon, OuterAddon)) == number


# ------------------------------------------------------------------------------------------------- add-ons by name


def test_add_ons_are_found_by_their_name():
    assert Task.add_on("AMPAddon", "EMA") is Task.add_on(AMPAddon, EMAAddon)
    with pytest.raises(AddOnError, match=r"no add-on is called 'AMPAdon'; did you mean 'AMPAddon'?"):
        Task.add_on("AMPAdon")
    with pytest.raises(AddOnError, match=r"no add-on is called 'state'; did you mean 'StateManagerAddon'"):
        Task.add_on("state")
    with pytest.raises(AddOnError, match=r"no add-on is called 'qqq'; installed are AMPAddon, "):
        Task.add_on("qqq")


def _install(folder, name, entries):
    """A distribution as pip leaves it behind."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zae.addons]\n" + "\n".join(entries) + "\n")


def test_names_of_other_distributions(tmp_path, monkeypatch):
    (tmp_path / "zae_other_parts.py").write_text(
        "from zae import AddOnBase\nclass RemoteAddon(AddOnBase):\n    'Far away.'\n"
    )
    _install(tmp_path, "zae-other", ["RemoteAddon = zae_other_parts:RemoteAddon", "GoneAddon = zae_gone:GoneAddon"])
    monkeypatch.syspath_prepend(tmp_path)
    assert Task.add_on("Remote").__name__ == "Task[RemoteAddon]"
    with pytest.raises(AddOnRequirement, match=r"'GoneAddon' .* cannot be imported: No module named 'zae_gone'"):
        Task.add_on("GoneAddon")
    _install(tmp_path, "zae-more", ["RemoteAddon = zae_more_parts:RemoteAddon"])
    importlib.invalidate_caches()
    with pytest.raises(AddOnConflict, match=r"installed more than once: .*zae-more.*; import the one that is meant"):
        Task.add_on("RemoteAddon")


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_clp": 1.0},
            r"unknown argument 'gradient_clp' for Task\[AMPAddon\]; did you mean 'gradient_clip'\?",
        ),
        ({"precison": "bf16"}, r"unknown argument 'precison' for Task\[AMPAddon\]; did you mean 'precision'\?"),
        ({"save_path": "x"}, r": it is an option of StateManagerAddon; add it with .add_on\(StateManagerAddon\)"),
        ({"save_pth": "x"}, r"did you mean 'save_path', an option of StateManagerAddon\? Add it with .add_on\(StateM"),
        ({"zzzzzz": 1}, r"unknown argument 'zzzzzz' for Task\[AMPAddon\]; it has model, device, mode"),
        ({"model": torch.nn.Linear(1, 1)}, "got 'model' twice: by position and by name; keep one"),
    ],
)
def test_options_are_checked_before_any_init_runs(options, message):
    """E1, E2"""
    ran = []

    class Watched(Task):
        def __init__(self, *args, **kwargs):
            ran.append(1)
            super().__init__(*args, **kwargs)

    Watched.__name__ = "Task"
    with pytest.raises(OptionError, match=message):
        make(Watched.add_on(AMPAddon), **options)
    assert ran == []


def test_a_missing_option_and_too_many_positions():
    with pytest.raises(
        OptionError, match=r"needs 'save_path', an option of StateManagerAddon; write Task\[StateManager"
    ):
        make(Task.add_on(StateManagerAddon))
    with pytest.raises(OptionError, match=r"takes 5 positional arguments \(model, device, mode, optimizer, scheduler\) "
                                          r"and got 6; name the others: log_bar"):  # fmt: skip
        Task(torch.nn.Linear(1, 1), "cpu", "train", None, None, True)


def test_the_message_for_an_unknown_option_survives_a_broken_installation():
    code = (
        "import sys; sys.modules['zae.addons.ema'] = None\n"
        "import zae, torch\n"
        "class T(zae.Trainer):\n"
        "    def train_step(self, batch): ...\n"
        "    def test_step(self, batch): ...\n"
        "try: T(torch.nn.Linear(1, 1), zzz=1)\n"
        "except zae.OptionError as error: sys.stdout.write(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "unknown argument 'zzz' for T; it has model" in done.stdout, done.stderr
