"""Every mistake of the catalogue is refused with its cause and its remedy."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys

import pytest

import zae
from kit.error_catalogue import meet, text_of
from kit.mistakes import CATALOGUE
from zae import errors

WITH_TORCHS_MESSAGE = {
    "attribute_that_nobody_set",
    "float_labels",
    "double_inputs",
    "evaluation_that_fails",
    "loss_kept_with_its_graph",
    "batch_without_a_collate_fn",
}


def test_the_catalogue_is_large_and_whole():
    """At least 40 mistakes, the most common ones among them."""
    assert len(CATALOGUE) >= 40
    assert all(each.phrases for each in CATALOGUE.values())
    assert set(CATALOGUE) >= {
        "misspelt_option",
        "step_without_loss",
        "detached_loss",
        "float_labels",
        "misspelt_monitor",
        "misspelt_hook",
        "dataset_instead_of_loader",
        "loader_instead_of_model",
        "logging_into_nothing",
    }


@pytest.mark.parametrize("name", CATALOGUE)
def test_mistake(name):
    """The type, the cause and the remedy."""
    error = meet(name)
    assert type(error) is CATALOGUE[name].error
    assert isinstance(error, (zae.ZaeError, UserWarning)) != (name in WITH_TORCHS_MESSAGE)
    assert [phrase for phrase in CATALOGUE[name].phrases if phrase not in text_of(error)] == [], text_of(error)


@pytest.mark.parametrize("name", sorted(WITH_TORCHS_MESSAGE))
def test_an_error_of_the_users_code_is_theirs_with_a_note(name):
    """The traceback ends in the user's or torch's own line, and what zae knows is a note below it."""
    error = meet(name)
    assert type(error).__module__ == "builtins"
    assert "the batch was" in error.__notes__[-1]
    assert "float" in error.__notes__[-1]
    assert error.__cause__ is None
    assert error.__context__ is None


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = dict(re.findall(r"[|`]-- (\w+)(?: \(([\w, ]+)\))?", errors.__doc__))
    public = {n for n in errors.__all__ if inspect.isclass(getattr(errors, n))}
    assert set(drawn) | {"ZaeError"} == public
    for name, families in drawn.items():
        cls = getattr(errors, name)
        assert issubclass(cls, errors.ZaeError)
        bases = {b.__name__ for b in cls.__bases__ if b.__module__ == "builtins"}
        assert bases == set(filter(None, families.split(", "))), name
        assert name in zae.__all__


@pytest.mark.parametrize("name", list(errors.__all__))
def test_errors_pickle(name):
    """An error of a rank travels to the caller as it is."""
    error = getattr(errors, name)("what, where, found, remedy")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) == "what, where, found, remedy"


def test_an_absent_name_is_explained():
    """``hasattr`` and ``dir`` stay what they are, and a class or an instance may have the name."""
    from kit.mistakes import Task, trainer_of

    class Own(Task):
        def predict_batch(self):
            return "predicted"

    trainer = trainer_of(Own)
    assert not hasattr(trainer, "fit")
    assert not hasattr(Own, "fit")
    assert getattr(trainer, "fit", 3) == 3
    assert "fit" not in dir(trainer) + dir(Own)
    with pytest.raises(
        zae.MissingError, match=r"^Own has no attribute 'load_from_checkpoint'; here it is apply_weights"
    ):
        Own.load_from_checkpoint("last.ckpt")
    assert trainer.predict_batch() == "predicted"
    assert {"predict_batch", "run"} <= set(dir(trainer))
    trainer.epoch = 3
    assert copy.deepcopy(trainer).epoch == 3
    assert type(trainer_of()).__getattribute__ is object.__getattribute__


def test_python_suggests_the_name_that_was_meant(capsys):
    from kit.mistakes import trainer_of

    with pytest.raises(AttributeError) as caught:
        trainer_of().evaluat([])
    sys.__excepthook__(caught.type, caught.value, caught.tb)
    assert "'Task' object has no attribute 'evaluat'. Did you mean: 'evaluate'?" in capsys.readouterr().err


def test_names_that_need_an_add_on():
    from kit.mistakes import trainer_of

    owners = {
        "CallbackAddon": ["add_callback", "pop_callback", "remove_callback"],
        "HuggingFaceAddon": ["log_metrics", "model_exists", "push_to_hub", "save_metrics"],
        "EMAAddon": ["save_average"],
        "StateManagerAddon": ["save_state", "load_state", "restore_best", "last_path", "best_path"],
    }
    for owner, names in owners.items():
        for name in names:
            assert name in dir(getattr(zae.addons, owner))
            with pytest.raises(zae.MissingError) as caught:
                getattr(trainer_of(), name)
            remedy = f"here it is part of {owner}; add it with .add_on({owner})"
            assert str(caught.value) == f"Task has no attribute {name!r}; {remedy}"
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
