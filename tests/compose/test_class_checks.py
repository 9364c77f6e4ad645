"""What a class of add-ons is refused for: an override without super(), a misspelt hook, an __init__ that swallows."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest
import torch
from typing_extensions import override

from kit.lines import InnerAddon, MiddleAddon, OuterAddon, Task, batches, make, weights
from zae import (
    AddOnBase,
    AddOnConflict,
    AddOnError,
    AddOnOrder,
    OptionError,
    TaskError,
    Trainer,
    repeats,
    replaces,
)
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon
from zae.compose.hints import HOOKS

# ------------------------------------------------------------------------------------------------- super() and hooks


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


KINDS = [name for name in vars(_Recorder) if name.startswith("by_")]


class _Ends:
    """Methods that call ``super()`` and give back nothing, or something in one way or another."""

    @staticmethod
    def nothing_by_itself(self):
        self.parents()

    @staticmethod
    def nothing_by_a_bare_return(self):
        for _ in range(2):
            with self.batch_context():
                self.parents()
        return

    @staticmethod
    def nothing_in_a_try(self):
        try:
            self.parents()
        finally:
            self.seen = True

    @staticmethod
    def something_now_and_then(self):
        stepped = self.parents()
        if stepped:
            return True

    @staticmethod
    def something_in_one_branch(self):
        return self.parents() if self.parameters else None

    @staticmethod
    def nothing_in_the_other_branch(self):
        return None if self.parameters else self.parents()

    @staticmethod
    def something_in_a_context(self):
        with self.batch_context():
            return self.parents()

    @staticmethod
    def something_before_a_finally(self):
        try:
            return self.parents()
        finally:
            self.seen = True


@pytest.mark.parametrize("base", [AddOnBase, Task])
@pytest.mark.parametrize("kind", [name for name in vars(_Ends) if "thing" in name])
def test_what_a_hook_gives_is_given_on(kind, base):
    """A step whose result is forgotten would count as skipped, and neither scheduler nor average would move."""
    made = type("OneAddon", (base,), {})
    ends = getattr(_Ends, kind)

    def optimizer_step(self):
        self.parents = super(made, self).optimizer_step
        return ends(self)

    made.optimizer_step = optimizer_step
    cls = Task.add_on(made) if base is AddOnBase else made
    if kind.startswith("something"):
        assert make(cls).run(1, batches(2))["step"] == 2
        return
    error = AddOnError if base is AddOnBase else TaskError
    with pytest.raises(error, match=r"OneAddon.optimizer_step returned None.* write return super\(\).optimizer_step"):
        make(cls).run(1, batches(2))


def test_a_hook_that_gives_nothing_needs_no_return():
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
def test_a_hook_overridden_without_super_ends_the_first_step_before_the_optimizer(kind):
    namespace = getattr(_Recorder, kind)()
    name = next(iter(namespace))
    skipped = "skips the add-ons inside it and the default"
    match = (
        rf"LossyAddon.{name} overrides a hook without calling super\(\), and so {skipped}; call super\(\).{name}"
        r"\(\.\.\.\), or mark .* @zae"
    )
    trainer = make(Task.add_on(type(Task)("LossyAddon", (AddOnBase,), namespace)))
    before = weights(trainer)
    with pytest.raises(AddOnError, match=match):
        trainer.run(1, batches(2))
    assert torch.equal(before, weights(trainer))


WATCHED = """on_step_begin batch_context gradients micro_batches sync_context to_device micro_step forward_context
    backward normalize unscale clip should_step step_one optimizer_step zero_grad logging on_step_end"""


@pytest.mark.parametrize("name", WATCHED.split())
def test_each_hook_of_a_step_is_watched(name):
    """Of an add-on that does the whole work of the core by itself, and so skips the add-on inside of it."""

    class InsideAddon(AddOnBase):
        layer = "loop"

    def inside(self, *args, **kwargs):
        return getattr(super(InsideAddon, self), name)(*args, **kwargs)

    setattr(InsideAddon, name, inside)
    answers = {
        "batch_context": contextlib.nullcontext(), "sync_context": contextlib.nullcontext(),
        "forward_context": contextlib.nullcontext(), "should_step": True, "step_one": True, "optimizer_step": True,
    }  # fmt: skip

    def outside(self, *args, **kwargs):
        if name == "gradients":
            loss = self.model(args[0]).square().mean()
            loss.backward()
            return [({"loss": loss}, 1.0)]
        if name == "micro_step":
            loss = self.model(args[0]).square().mean()
            loss.backward()
            return {"loss": loss}, 1.0
        if name == "backward":
            return args[0].backward()
        return {"micro_batches": args, "to_device": args[0] if args else None}.get(name, answers.get(name))

    outer = type(Task)("OutsideAddon", (AddOnBase,), {"layer": "observe", name: outside})
    with pytest.raises(AddOnError, match=rf"OutsideAddon.{name} overrides a hook .* skips what InsideAddon does there"):
        make(Plain.add_on(outer, InsideAddon)).run(1, list(torch.randn(2, 4, 3)))
    assert make(Plain.add_on(InsideAddon)).run(1, list(torch.randn(2, 4, 3)))["step"] == 2


class Plain(Trainer):
    """The loss of a batch alone."""

    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


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


def clip_inside(cls, trainer):
    super(cls, trainer).clip()


def test_super_is_found_in_the_functions_that_a_method_mentions():
    """Of the class, of its bases and of the module; whether they are called is for check_addon to count."""

    class HelpedAddon(AddOnBase):
        def clip(self):
            clip_inside(HelpedAddon, self)

        def unscale(self):
            getattr(super(), "unscale")()  # noqa: B009

        def zero_grad(self):
            if self.mode == "never":
                super().zero_grad()

    class DerivedAddon(HelpedAddon):
        def _clip(self):
            super().clip()

        def clip(self):
            self._clip()

    assert make(Task.add_on(DerivedAddon)).run(1, batches(1))["step"] == 1


def test_what_repeats_a_hook_calls_super():
    class LossyAddon(AddOnBase):
        @repeats
        def gradients(self, batch):
            return []

    with pytest.raises(AddOnError, match=r"LossyAddon.gradients overrides a hook without calling super\(\)"):
        make(Task.add_on(LossyAddon)).run(1, batches(1))


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
            for optimizer in self.optimizers.values():
                optimizer.step()
            return True

    make(Free.add_on(AMPAddon, InnerAddon)).run(1, batches(1))

    class Above(Task.add_on(InnerAddon)):
        def clip(self):
            pass

    class Mixin:
        def clip(self):
            pass

    class Mixed(Mixin, InnerAddon, Task):
        pass

    with pytest.raises(TaskError, match=r"Above.clip .* skips what InnerAddon does there; call super\(\).clip"):
        make(Above).run(1, batches(1))
    with pytest.raises(TaskError, match=r"Mixin.clip .* skips what InnerAddon does there"):
        make(Mixed).run(1, batches(1))


@pytest.mark.parametrize("name", ["run", "run_epoch", "run_batch", "add_on", "evaluate", "inference", "predict"])
def test_the_loop_is_not_for_add_ons(name):
    with pytest.raises(
        AddOnError, match=f"LoopAddon overrides {name}, which is the loop itself; override a hook insid"
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
        "private": ("_begin_emty", override(backwards)),
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
def test_a_name_one_letter_from_a_hook_is_warned_of(name, meant, base):
    with pytest.warns(UserWarning, match=rf"X.{name} is not called by the loop \(did you mean '{meant}'\?\)") as caught:
        type(Task)("X", (base,), {name: lambda self, *args: None})
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_of_another_trainer_is_warned_of(name):
    with pytest.warns(UserWarning, match="is not called by the loop") as caught:
        type(Task)("X", (Task,), {name: lambda self, batch: None})
    text = f"X.{name} is not called by the loop (here it is {HOOKS[name]}). If your code calls it, nothing"
    assert [str(each.message) for each in caught] == [f"{text} is wrong"]


def test_one_warning_names_all_methods_of_a_class():
    with pytest.warns(UserWarning, match=r"X.training_step is .*; X.set_up is not .*'setup'") as caught:
        type(Task)("X", (Task,), {"training_step": lambda self, batch: None, "set_up": lambda self: None})
    assert len(caught) == 1


HELPFUL = """denormalize normalize_batch compute_metrics compute_accuracy train_dataloader val_dataloader prepare_data
    prepare_batch build_model make_loaders log_images plot show fit test eval profile epoch lr to cuda
    save load print forward freeze unfreeze state callbacks name epochs batch_size num_classes loss_fn criterion
    metrics_of accuracy tokenizer collate augment augmentations transform sample generate decode encode
    predict_batch step_count is_due scheduler_name optimizer_of val_step eval_step training_loss clip_value weights"""


@pytest.mark.parametrize("name", HELPFUL.split())
@pytest.mark.filterwarnings("error")
def test_a_helper_may_have_any_name(name):
    """Of the class itself, of a mixin before and after Trainer; it is what Python finds, and no warning is given."""
    own = {name: lambda self, *args: "mine"}
    mixin = type("Mixin", (), dict(own))
    for cls in (
        type(Task)("Own", (Task,), dict(own)),
        type(Task)("Before", (mixin, Task), {}),
        type(Task)("After", (Task, mixin), {}),
    ):
        trainer = make(cls)
        assert getattr(trainer, name)() == "mine"
        assert trainer.run(1, batches(1))["step"] == 1


def test_a_hook_in_a_plain_mixin_is_the_mixins_own(recwarn):
    class Hooks:
        def on_train_epoch_end(self): ...

    class Mixed(Hooks, Task):
        pass

    assert not recwarn.list
    assert make(Mixed).run(1, batches(1))["step"] == 1


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        ({"clip": 0.5}, r"X.clip = 0.5 hides the trainer's method clip\(\); give it another name"),
        ({"log": []}, r"X.log = \[\] hides the trainer's method log\(\)"),
        ({"metrics": {}}, "hides the trainer's property 'metrics'; give it another name"),
        ({"should_stop": lambda self: False}, "X.should_stop is a property of the trainer; put @property above it"),
        (
            {"clip": property(lambda self: None)},
            "X.clip is a property, but the trainer calls it; remove @property",
        ),
        ({"forward_context": _empty_context}, "X.forward_context yields, .* put @contextlib.contextmanager above it"),
    ],
)
def test_an_attribute_of_the_wrong_kind_is_refused(namespace, message):
    with pytest.raises(TaskError, match=message):
        type(Task)("X", (Task,), namespace)


def test_a_signature_that_the_loop_cannot_call_is_refused():
    message = r"X.train_step\(self, batch, batch_idx\) does not fit the call in the loop; write def train_step\(self, b"
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
        (lambda self, *, alpha: None, r"does not accept the arguments of the trainer; write .*self, \*args, alpha, "),
        (lambda self: None, "does not accept the arguments of the trainer"),
    ],
)  # fmt: skip
def test_an_add_ons_init_that_swallows_is_refused(init, message):
    with pytest.raises(AddOnError, match=f"InitAddon.__init__ {message}"):
        _addon(init)


def test_a_forgotten_super_init_is_said_in_words():
    class Forgetful(Task):
        def __init__(self, *args, **kwargs):
            self.ready = True

    with pytest.raises(TaskError, match=r"Forgetful.__init__ does not call super\(\).__init__, .*; write super\(\)"):
        make(Forgetful)
    quiet = type(Task)("QuietAddon", (AddOnBase,), {"__init__": lambda self, *args, alpha=1, **kwargs: None})
    with pytest.raises(TaskError, match=r"QuietAddon.__init__ does not call super\(\).__init__"):
        make(Task.add_on(quiet))

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
    with pytest.raises(AttributeError, match=r"property 'metrics' of '.*Measured' object has no setter"):
        make(Measured)


@pytest.mark.parametrize(("name", "value"), {"best": 1e9, "device": "cpu", "history": [], "current_run": None}.items())
def test_an_attribute_set_by_init_that_the_trainer_reads_is_refused(name, value):
    class Own(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            setattr(self, name, value)

    with pytest.raises(TaskError, match=f"Own.__init__ sets self.{name}, which the trainer keeps for itself; give"):
        make(Own)


@pytest.mark.parametrize(
    ("value", "cause"), [(None, "returned None, and the loop needs its return value"), (0.5, "returned float")]
)
def test_a_validation_that_gives_no_metrics_is_refused(value, cause):
    class Own(Task):
        def validate(self):
            return value

    with pytest.raises(TypeError, match=f"Own.validate {cause}"):
        make(Own).run(1, batches(), batches())


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
        with pytest.raises(OptionError, match=r"needs 'model'(; write| \(\w+\); write)"):
            Task.add_on(*add_ons)(device="cpu")


def test_an_option_taken_out_of_kwargs_is_to_be_declared():
    class Popping(Task):
        def __init__(self, *args, **kwargs):
            self.sharpness = kwargs.pop("sharpness", 1.0)
            super().__init__(*args, **kwargs)

    with pytest.raises(OptionError, match=r"write def __init__\(self, \*args, sharpness=..., \*\*kwargs\) there"):
        make(Popping, sharpness=2.0)


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
    """Never swallowed by ``**kwargs``: an option of the trainer, and one of an add-on inside."""

    class Lossy(Task):
        def __init__(self, model, device, *, optimizer, log_bar, **kwargs):
            super().__init__(model, device, optimizer=optimizer, log_bar=log_bar)

    class LossyAddon(AddOnBase):
        layer = "observe"

        def __init__(self, *args, alpha=1, **kwargs):
            known = {name: kwargs[name] for name in ("optimizer", "log_bar") if name in kwargs}
            super().__init__(*args, **known)
            self.alpha = alpha

    with pytest.raises(TaskError, match=r"gradient_clip=0.5 was given to Lossy and lost: Lossy.__init__ does not pass"):
        make(Lossy, gradient_clip=0.5)
    cls = Task.add_on(LossyAddon, GradientAccumulationAddon)
    with pytest.raises(TaskError, match=r"gradient_accumulation_steps=4 was given .* lost: LossyAddon.__init__ does"):
        make(cls, gradient_accumulation_steps=4)


@pytest.mark.parametrize("name", ["_run", "optimization", "history", "progress_checker"])
@pytest.mark.parametrize("base", [Task, AddOnBase])
def test_the_parts_of_a_trainer_are_not_for_others(base, name):
    def init(self, *args, **kwargs):
        super(made, self).__init__(*args, **kwargs)
        setattr(self, name, 0)

    made = type(Task)("X", (base,), {"__init__": init})
    with pytest.raises(TaskError, match=f"__init__ sets self.{name}"):
        make(made if base is Task else Task.add_on(made))


def test_names_that_two_classes_mean_as_their_own_are_refused():
    """Two add-ons, or an add-on and a task, with one helper, one method or one attribute would undo each other."""

    class OneAddon(AddOnBase):
        state_attributes = ("_count",)

        def _helper(self): ...

        def report(self): ...

    class TwoAddon(AddOnBase):
        def _helper(self): ...

    class ThreeAddon(AddOnBase):
        rank_state_attributes = ("_count",)

    class FourAddon(AddOnBase):
        process_attributes = {"_helper": False}

    class Reporting(Task):
        def report(self): ...

    class Layered(Task):
        layer = 3

    with pytest.raises(AddOnConflict, match="TwoAddon and OneAddon both define '_helper', and one would overwrite"):
        Task.add_on(OneAddon, TwoAddon)
    with pytest.raises(AddOnConflict, match="ThreeAddon and OneAddon both define '_count'"):
        Task.add_on(OneAddon, ThreeAddon)
    with pytest.raises(AddOnConflict, match="OneAddon and FourAddon both define '_helper'"):
        Task.add_on(OneAddon, FourAddon)
    with pytest.raises(AddOnConflict, match=r"OneAddon and Reporting both define 'report', .*; rename it in Reporting"):
        Reporting.add_on(OneAddon)
    with pytest.raises(AddOnConflict, match=r"both define 'layer', .*; rename it in Layered"):
        Layered.add_on(InnerAddon)

    class PoliteAddon(AddOnBase):
        def report(self):
            return super().report()

    class Above(Task.add_on(OneAddon)):
        def _helper(self): ...

    assert Reporting.add_on(PoliteAddon).report is PoliteAddon.report
    assert Above.add_on(InnerAddon)._helper is Above._helper


def test_a_replaced_hook_leaves_out_nobodys_work():
    class WholeAddon(AddOnBase):
        layer = "control"

        @replaces
        def clip(self): ...

    class Clipping(Task):
        def clip(self): ...

    with pytest.raises(AddOnConflict, match="WholeAddon replaces clip, so what MiddleAddon does there is skipped; use"):
        Task.add_on(MiddleAddon, WholeAddon)
    with pytest.raises(AddOnConflict, match="WholeAddon replaces clip, so what Clipping does there is skipped"):
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
