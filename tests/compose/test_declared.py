"""What a class declares of its attributes: where an option is held, and what belongs to a process."""

from __future__ import annotations

import copy
import sys
import threading
import warnings

import pytest

from kit.lines import Task, make
from zae import AddOnBase, AddOnError
from zae.addons import StateManagerAddon


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
