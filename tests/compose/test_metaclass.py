"""Composition: one class for a set of add-ons, whatever the order, or a refusal that says what to write instead."""

from __future__ import annotations

import doctest
import inspect
import itertools
from pathlib import Path

import pytest
import torch

import zae.compose
from kit.lines import LOCAL, TRACED, InnerAddon, MiddleAddon, OuterAddon, Task, WrappingAddon, batches, make, weights
from zae import AddOnBase, AddOnConflict, AddOnError, AddOnOrder, AddOnRequirement, OptionError, Trainer
from zae.addons import AMPAddon, EMAAddon
from zae.compose.introspect import LAYERS, add_ons_of, slots_of
from zae.compose.options import options_of

# --------------------------------------------------------------------------------------------- a set is a class


def test_add_on_is_a_pure_function_of_a_set():
    """Every order, and every way of chaining, is the same class."""
    whole = Task.add_on(*TRACED, WrappingAddon)
    for order in itertools.permutations((*TRACED, WrappingAddon)):
        assert Task.add_on(*order) is whole
        chained = Task
        for add_on in order:
            chained = chained.add_on(add_on)
        assert chained is whole
        assert Task.add_on(*order[:2]).add_on(*order[2:]) is whole


def test_the_local_add_ons_commute():
    """All orders of the add-ons that come with zae."""
    whole = Task.add_on(*LOCAL)
    assert all(Task.add_on(*order) is whole for order in itertools.permutations(LOCAL))
    layers = [LAYERS.index(a.layer) for a in add_ons_of(whole)]
    assert layers == sorted(layers, reverse=True)


def test_adding_twice_or_nothing_changes_nothing():
    """The same add-on twice is one."""
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
    """The same effective order and bitwise the same weights, whatever the order of the arguments."""
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
    """An add-on put on a user's class that stands on add-ons finds its place below the user's own methods."""
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
    with pytest.raises(AddOnRequirement, match=r"NeedyAddon needs NeededAddon, which is missing"):
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
    with pytest.raises(AddOnError, match=r"WrongAddon.apply is not a classmethod; write @classmethod def apply"):

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
        match=r"NeedyAddon needs InnerAddon, which is missing; write \.add_on\(InnerAddon, NeedyAddon\)",
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
        AddOnOrder,
        match=r"no order of AAddon, BAddon satisfies their declarations: AAddon .* 'observe', inside BAddon;",
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

    with pytest.raises(AddOnConflict, match=r"both have an option 'decay'; rename one of them, or move it"):
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
    with pytest.raises(AddOnError, match=r"Odd is not an add-on; write class Odd\(AddOnBase\): ..., and Task.add_on"):
        Task.add_on(type("Odd", (), {}))
    with pytest.raises(AddOnError, match=r"int is not an add-on; write class MyAddon\(AddOnBase\)"):
        Task.add_on(int)
    with pytest.raises(AddOnError, match=r"Task is not an add-on; write class MyAddon\(AddOnBase\)"):
        Trainer.add_on(Task)
    with pytest.raises(AddOnError, match=r"AddOnBase is the base of all add-ons"):
        Task.add_on(AddOnBase)
    with pytest.raises(AddOnError, match=r"one by one, and got \[.*; write add_on\(A, B\)"):
        Task.add_on([AMPAddon, EMAAddon])
    with pytest.raises(AddOnError, match=r"takes classes, one by one, and got <"):
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


def test_the_example_of_the_page_about_composition_runs() -> None:
    page = Path(zae.compose.__file__).with_name("README.md")
    assert doctest.testfile(str(page), module_relative=False).failed == 0
