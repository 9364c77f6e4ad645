"""AddOnBase: what it declares, what it takes out of a state, and that it changes nothing by itself."""

from __future__ import annotations

import inspect

import pytest
import torch

from zae import AddOnBase, CheckpointMismatch, Trainer, hook, replaces
from zae.compose.introspect import LAYERS, hooks_of


class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


class EmptyAddon(AddOnBase):
    """Do nothing."""


def make(cls):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False)


def test_an_empty_add_on_changes_nothing():
    batches = list(torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(0)))
    plain, empty = make(Task), make(Task.add_on(EmptyAddon))
    plain.run(2, batches)
    empty.run(2, batches)
    assert torch.equal(plain.model.weight, empty.model.weight)
    assert plain.state_dict().keys() == empty.state_dict().keys()


def test_the_defaults():
    assert (EmptyAddon.layer, EmptyAddon.slot) == ("observe", None)
    assert EmptyAddon.inside == EmptyAddon.outside == EmptyAddon.requires == ()
    assert LAYERS == ("model", "loop", "precision", "parallel", "state", "control", "observe")


def test_the_default_apply_is_add_on():
    assert EmptyAddon.apply(Task) is Task.add_on(EmptyAddon)


def test_add_on_base_adds_no_option_and_no_hook():
    assert "__init__" not in AddOnBase.__dict__
    assert hooks_of(AddOnBase) == hooks_of(Trainer)
    assert {name for name in vars(AddOnBase) if not name.startswith("_")} == {
        "layer", "inside", "outside", "slot", "requires", "apply", "take",
        "state_attributes", "rank_state_attributes", "state_dict", "load_state_dict", "generator", "evaluation_context",
        "adapt_state", "merge_ranks", "process_attributes", "traits", "excludes", "checks_model", "lockstep_forward",
        "replicated_options",
    }  # fmt: skip


def test_take_splits_a_state_and_leaves_it_as_it_is():
    state = {"model": {}, "EmptyAddon": {"count": 3}, "OtherAddon": {}}
    own, rest = AddOnBase.take(state, "EmptyAddon")
    assert own == {"count": 3}
    assert rest == {"model": {}, "OtherAddon": {}}
    assert list(state) == ["model", "EmptyAddon", "OtherAddon"]


@pytest.mark.parametrize("state", [{"model": {}}, {"model": {}, "EmptyAddon": None}], ids=["absent", "None"])
def test_take_refuses_a_state_without_the_part(state):
    with pytest.raises(CheckpointMismatch, match=r"the state has no entry of EmptyAddon: .* load it with strict=False"):
        AddOnBase.take(state, "EmptyAddon")
    assert AddOnBase.take(state, "EmptyAddon", strict=False) == (None, {"model": {}})


def test_every_hook_says_what_it_is_for():
    """DESIGN section 4: a docstring on each, of at least a whole sentence."""
    for name, owner in hooks_of(Trainer).items():
        text = inspect.getdoc(owner.__dict__[name])
        assert text, name
        assert text.splitlines()[0].endswith((".", ":")), name


def test_every_hook_is_one_that_the_loop_calls():
    """A hook that is documented is fired: something calls each hook, beside those that override it.

    Only ``barrier`` is for the steps and add-ons of users alone: what zae waits for is an answer of every rank.
    """
    from pathlib import Path

    import zae

    folder = Path(zae.__file__).parent
    sources = "\n".join(path.read_text() for path in [*folder.rglob("*.py"), *folder.parent.glob("addons/**/*.py")])
    for name in set(hooks_of(Trainer)) - {"barrier"}:
        calls = (f"self.{name}", f"trainer.{name}", f'(self, "{name}"', f'(trainer, "{name}"')
        assert any(call in sources for call in calls), name


def test_marks():
    def function(self): ...

    assert hook(function) is function
    assert function.__hook__ is True
    assert replaces(function) is function
    assert function.__replaces__ is True
    getter = property(lambda self: 1)
    assert hook(getter) is getter
    assert getter.fget.__hook__ is True
