"""What a class declares of its attributes: where an option is held, and what belongs to a process."""

from __future__ import annotations

import copy
import sys
import threading
import warnings

import pytest

from kit.lines import Task, make
from zae import AddOnBase, AddOnConflict, AddOnError
from zae.addons import StateManagerAddon
from zae.compose.introspect import add_ons_of, traits_of, with_trait


def test_explain_shows_the_value_of_an_option_that_a_part_holds(tmp_path):
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


class ShardAddon(AddOnBase):
    """Divide the weights."""

    layer = "parallel"
    traits = ("cuts_weights",)


class RingAddon(ShardAddon):
    """Divide the weights, and order the ranks in a ring."""

    traits = ("makes_ring",)


class WholeAddon(AddOnBase):
    """Need whole weights."""

    layer = "observe"
    excludes = {"cuts_weights": "it reads whole weights; leave WholeAddon out", "whole": "one is enough"}
    slot = "whole"


@pytest.mark.parametrize("divides", [ShardAddon, RingAddon])
@pytest.mark.parametrize("turned", [False, True])
def test_a_trait_that_another_add_on_excludes_is_refused(divides, turned):
    """A derived class has those of its base too; neither add-on knows the name of the other."""
    pair = (WholeAddon, divides)[:: -1 if turned else 1]
    text = f"WholeAddon and {divides.__name__} do not go together: it reads whole weights; leave WholeAddon out"
    with pytest.raises(AddOnConflict, match=text):
        Task.add_on(*pair)
    assert traits_of(RingAddon) == {"makes_ring", "cuts_weights"}


def test_an_add_on_does_not_exclude_itself():
    """Nor one that is derived from it."""
    derived = type(AddOnBase)("MoreAddon", (WholeAddon,), {})
    for each in (WholeAddon, derived):
        assert with_trait(Task.add_on(each), "whole") is each
        assert with_trait(Task.add_on(each), "cuts_weights", "makes_ring") is None


@pytest.mark.parametrize("relation", ["inside", "outside"])
@pytest.mark.parametrize("names", [("marked",), ("place",), ("BAddon",)])
def test_an_add_on_is_ordered_by_the_traits_slot_or_name_of_another(relation, names):
    b = type(AddOnBase)("BAddon", (AddOnBase,), {"layer": "loop", "traits": ("marked",), "slot": "place"})
    for name in ("AAddon", "CAddon"):  # Without a relation, ties go by name.
        other = type(AddOnBase)(name, (AddOnBase,), {"layer": "loop", relation: names})
        order = [other, b] if relation == "outside" else [b, other]
        assert add_ons_of(Task.add_on(other, b)) == order


@pytest.mark.parametrize("traits", ["cuts_weights", (1,), None])
def test_traits_that_are_no_tuple_of_names_are_refused(traits):
    with pytest.raises(AddOnError, match="it must be a tuple of names"):
        type(AddOnBase)("WrongAddon", (AddOnBase,), {"traits": traits})
