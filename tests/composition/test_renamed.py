"""Renamed seams: classes and callers with the former names work as with the new ones, and are warned."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import sys
import threading
import warnings
from typing import Any

import pytest
import torch

from kit.lines import Task, batches, make, weights
from zae import AddOnBase, AddOnError, replaces
from zae.addons import GradientAccumulationAddon, StateManagerAddon
from zae.testing import check_addon


def scaling(name: str, factor: float, base: Any, **members: Any) -> Any:
    """Make a class that multiplies the loss, with an override of this name."""

    def weigh(self, loss, num_targets, count):
        return factor * super(made, self).weigh(loss, num_targets, count)

    def scale_loss(self, loss, num_targets, count):
        return factor * super(made, self).scale_loss(loss, num_targets, count)

    method = weigh if name == "weigh" else scale_loss
    made: Any = type(base)(f"Scale{factor}Addon", (base,), {name: method, "__module__": __name__, **members})
    return made


def trained(cls: Any, **options: Any) -> torch.Tensor:
    trainer = make(cls, **options)
    trainer.run(1, batches(3))
    return weights(trainer)


def quiet(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function and ignore the warning of the old name."""
    with pytest.warns(DeprecationWarning, match="weigh"):
        return function(*args, **kwargs)


@pytest.fixture(scope="module")
def chains():
    """The trained weights of a task, a plain mixin and two add-ons, for each choice of their names."""
    found = {}
    for names in itertools.product(("weigh", "scale_loss"), repeat=4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inner = scaling(names[0], 2, AddOnBase, layer="loop")
            outer = scaling(names[1], 0.3, AddOnBase, layer="observe")
            task, mixin = scaling(names[2], 5, Task), scaling(names[3], 0.7, object)
            cls = type(Task)("MixedTask", (mixin, task), {}).add_on(inner, outer, GradientAccumulationAddon)
            found[names] = trained(cls, gradient_accumulation_steps=2), [str(each.message) for each in caught], cls
    return found


def test_mixed_names_are_one_chain(chains):
    """Each override runs once and in its place, whatever the names around it."""
    expected = chains[("scale_loss",) * 4][0]
    assert len(chains) == 16
    assert not torch.equal(expected, trained(Task.add_on(GradientAccumulationAddon), gradient_accumulation_steps=2))
    assert all(torch.equal(found, expected) for found, *_ in chains.values())


def test_each_class_is_warned_of_once(chains):
    """A warning names the class and the new name; the calls themselves and the new names do not warn."""
    for names, (_, messages, _) in chains.items():
        old = [f"Scale{f}Addon" for name, f in zip(names, (2, 0.3, 5, 0.7), strict=True) if name == "weigh"]
        assert messages == [
            f"{name} overrides weigh, which is now called scale_loss; rename the method" for name in old
        ]


def test_explain_shows_the_new_names(chains):
    pages = {str(cls.explain()) for *_, cls in chains.values()}
    assert len(pages) == 1
    (page,) = pages
    assert "loss = scale_loss(out" in page
    assert "weigh" not in page


def test_a_call_by_the_old_name_warns():
    """From outside, from another method, and where an instance is patched."""

    class CallingTask(Task):
        def clip(self):
            self.seen = self.weigh(torch.tensor(6.0), None, 2)
            super().clip()

    trainer = make(CallingTask)
    with pytest.warns(DeprecationWarning, match="CallingTask.weigh is now scale_loss; use that name") as caught:
        trainer.run(1, batches(1))
    assert (trainer.seen, caught[0].filename) == (3, __file__)
    with pytest.warns(DeprecationWarning, match="weight_of is now sample_weight") as caught:
        assert trainer.weight_of(batches(1)[0], None) == 8
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="sample_weight"):
        trainer.weight_of = lambda batch, num_targets: 2.0
    assert trainer.sample_weight(None, None) == 2


def test_the_warning_points_to_the_class():
    with pytest.warns(DeprecationWarning, match="OldAddon overrides weight_of, which is now called sample") as caught:

        class OldAddon(AddOnBase):
            """Give every batch the same weight."""

            layer = "loop"

            @replaces
            def weight_of(self, batch, num_targets):
                return 1.0

    assert caught[0].filename == __file__
    check_addon(OldAddon, allow=["pickle"])  # The class of a function cannot be found by its name.


def test_a_class_for_both_versions_is_left_alone():
    """It defines both names, and its own old method stays what it is."""

    class BothAddon(AddOnBase):
        """Double the loss."""

        layer = "loop"

        def scale_loss(self, loss, num_targets, count):
            return 2 * super().scale_loss(loss, num_targets, count)

        def weigh(self, loss, num_targets, count):
            return 2 * super().weigh(loss, num_targets, count)

    assert torch.equal(trained(Task.add_on(BothAddon)), trained(Task.add_on(scaling("scale_loss", 2, AddOnBase))))


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("save_format", "checkpointer.model_format", "ckpt"),
        ("keep_last", "checkpointer.retention.last", 5),
        ("keep_best", "checkpointer.retention.best", 0),
        ("run_id", "checkpointer.run_id", "other"),
        ("save_async", "checkpointer.saver.background", True),
        ("resume", "", "auto"),
        ("mid_epoch", "", "restart"),
        ("reshard", "", True),
        ("allow_partial", "", ["state.json"]),
    ],
)
def test_an_old_attribute_is_read_and_set_at_its_new_place(old, new, changed, tmp_path):
    trainer = make(Task.add_on(StateManagerAddon), save_path=tmp_path)
    cure = f"{old} is now {new}; use that name" if new else f"{old} is not public anymore; keep the option"
    with pytest.warns(DeprecationWarning, match=cure) as caught:
        assert getattr(trainer, old) != changed
    with pytest.warns(DeprecationWarning, match=cure):
        setattr(trainer, old, changed)
    with pytest.warns(DeprecationWarning, match=cure):
        assert getattr(trainer, old) == changed
    assert caught[0].filename == __file__
    assert not new or operator.attrgetter(new)(trainer) == changed


def test_explain_shows_the_value_of_an_option_that_has_moved(tmp_path):
    """Without a warning, as for any other option."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = str(make(Task.add_on(StateManagerAddon), save_path=tmp_path, keep_last=7).explain())
    assert "keep_last=7" in page
    assert "resume=False" in page


def test_process_attributes_are_not_copied():
    """A copy and a pickle have the initial values, each its own object, of every class that declares some."""

    class FileAddon(AddOnBase):
        """Hold a lock, a list and a stream."""

        process_attributes = {"lock": None, "lines": []}

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.lock, self.lines, self.file, self.kept = threading.Lock(), ["a"], sys.stdout, [1]

    class MoreAddon(FileAddon):
        """Name one more."""

        process_attributes = {"file": None}

    trainer = make(Task.add_on(MoreAddon))
    first, second = copy.deepcopy(trainer), copy.deepcopy(trainer)
    assert (first.lock, first.lines, first.file, first.kept) == (None, [], None, [1])
    assert first.lines is not second.lines is not MoreAddon.process_attributes
    assert trainer.lines == ["a"]
    with pytest.raises(AddOnError, match=r"process_attributes is \('file',\); it must be a dict of names"):
        type(AddOnBase)("WrongAddon", (AddOnBase,), {"process_attributes": ("file",)})


def test_an_old_override_without_super_is_refused():
    def weigh(self, loss, num_targets, count):
        return loss

    with pytest.raises(AddOnError, match="scale_loss overrides a seam without calling super"):
        quiet(type(AddOnBase), "DropsAddon", (AddOnBase,), {"weigh": weigh})


def test_inspecting_a_trainer_reads_no_old_name(tmp_path):
    """Neither dir() nor inspect.getmembers, and so no help() or autocompletion, lists a name that warns or raises."""
    trainer = make(Task.add_on(StateManagerAddon), save_path=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (trainer, type(trainer)):
            names = {name for name, _ in inspect.getmembers(each)}
            assert {"scale_loss", "run"} <= names
            assert not {"weigh", "is_seeded", "fit"} & names
    with pytest.warns(DeprecationWarning, match="is_seeded"):
        assert not trainer.is_seeded
