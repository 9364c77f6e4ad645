"""What add-ons keep in a checkpoint: declared attributes, and what differs from rank to rank."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD

from kit.hand import digest, loader, network
from kit.rank_tasks import forks
from kit.table import Task
from zae import AddOnBase, AddOnError
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.errors import CheckpointMismatch
from zae.loop.addon_state import digest as digest_of
from zae.testing import check_addon


class SlowAddon(AddOnBase):
    """Move slow weights towards the weights every few steps, and continue from them (Zhang et al. 2019)."""

    layer = "control"
    state_attributes = ("slow",)

    def __init__(self, *args: Any, slow_every: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow_every = slow_every
        self.slow: dict[str, Any] = {}

    def setup(self) -> None:
        super().setup()
        for name, p in self.unwrap().named_parameters():
            self.slow.setdefault(name, p.detach().clone())

    def optimizer_step(self) -> bool:
        stepped = super().optimizer_step()
        if stepped and (self.progress_checker.step + 1) % self.slow_every == 0:
            with torch.no_grad():
                for name, p in self.unwrap().named_parameters():
                    p.copy_(self.slow[name].lerp_(p, 0.5))
        return stepped


class SlowerAddon(SlowAddon):
    """One that derives from it, and keeps more."""

    state_attributes = ("count", "notes", "far")
    rank_state_attributes = ("drawn",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count, self.notes, self.far, self.drawn = 0, ["begun"], torch.zeros(0), -1

    def logging(self, step_dict: Any, weight: float = 1) -> None:
        super().logging(step_dict, weight)
        if self.mode == "train":
            self.count += 1
            self.notes = [*self.notes, (self.count, "text")][-3:]
            self.far = torch.full((2,), float(self.count))


def build(*add_ons: Any, **options: Any) -> Any:
    model = network()
    return Task.add_on(*add_ons)(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), seed=3, **options)


def test_declared_attributes_are_saved_and_resumed(tmp_path: Path) -> None:
    """Nothing else is written for them; those of a base and of a class that derives from it, each under its name."""
    straight = build(SlowerAddon)
    straight.run(3, loader())
    for kind in ("ckpt", "safetensors"):
        first = build(SlowerAddon, StateManagerAddon, save_path=tmp_path / kind, save_format=kind)
        first.run(None, loader(), max_steps=8)
        state = first.state_dict()
        assert set(state["SlowAddon"]) == {"slow"}
        assert set(state["SlowerAddon"]) == {"count", "notes", "far", "drawn"}
        again = build(SlowerAddon, StateManagerAddon, save_path=tmp_path / kind, save_format=kind, resume="auto")
        again.run(3, loader())
        assert digest(again.model, *again.slow.values()) == digest(straight.model, *straight.slow.values())
        assert (again.count, again.notes, again.far.tolist()) == (18, straight.notes, [18.0, 18.0])


def test_declared_attributes_are_copied_where_a_state_is_loaded() -> None:
    first, second = build(SlowerAddon), build(SlowerAddon)
    first.run(1, loader())
    second.load_state_dict(first.state_dict())
    before = digest(*first.slow.values())
    second.run(1, loader())
    assert digest(*first.slow.values()) == before != digest(*second.slow.values())


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (None, "has no entry of SlowerAddon: it was saved without this add-on"),
        ({"count": 1}, "the state of SlowerAddon contains count; expected count, drawn, far, notes. Load"),
        ({"more": 1}, "contains count, drawn, far, more, notes; expected count, drawn, far, notes"),
        ({"count": "1"}, "does not fit: count was a str and is a int here"),
        ({"far": torch.zeros(3)}, r"far was \(3,\) torch.float32 and is \(2,\) torch.float32"),
        ({"far": torch.zeros(2, dtype=torch.float64)}, "far was .* torch.float64 and is"),
        ([1, 2], "contains a list; expected"),
    ],
)
def test_a_declared_state_that_does_not_fit_is_refused(entry: Any, match: str) -> None:
    """By name, and before anything is loaded."""
    first, second = build(SlowerAddon), build(SlowerAddon)
    first.run(1, loader())
    second.run(2, loader())
    state = first.state_dict()
    if isinstance(entry, dict) and entry != {"count": 1}:
        entry = {**state["SlowerAddon"], **entry}
    before, count = digest(second.model, *second.slow.values()), second.count
    with pytest.raises(CheckpointMismatch, match=match):
        second.load_state_dict({**state, "SlowerAddon": entry})
    assert (digest(second.model, *second.slow.values()), second.count) == (before, count)
    second.load_state_dict({key: value for key, value in state.items() if key != "SlowerAddon"}, strict=False)
    assert second.count == count


def test_what_cannot_be_declared_is_refused_when_the_class_is_made() -> None:
    for body, match in (
        ({"state_attributes": "slow"}, r"state_attributes is 'slow'; it must be a tuple of names"),
        ({"rank_state_attributes": (1,)}, "rank_state_attributes is"),
    ):
        with pytest.raises(AddOnError, match=match):
            type(AddOnBase)("OddAddon", (AddOnBase,), {"layer": "observe", "__doc__": "Odd.", **body})
    never = type(AddOnBase)("NeverAddon", (AddOnBase,), {"__doc__": "Never.", "state_attributes": ("never",)})
    with pytest.raises(AddOnError, match="NeverAddon declares the state attribute 'never', which it has not set"):
        build(never).state_dict()


def test_a_declaring_add_on_passes_the_kit() -> None:
    check_addon(SlowAddon, slow_every=2)


def test_digests_tell_values_apart() -> None:
    """Equal values are equal, whatever holds them; another order, type, shape or place of a value is another one."""
    values: list[Any] = [
        1, 1.0, True, "1", b"1", None, [1], (1,), {"a": 1}, {"b": 1}, [1, 2], [2, 1], [[1], 2], [[1, 2]],
        torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, 1), torch.tensor([1.0, 0.0]),
        torch.tensor([0.0, 1.0]), torch.tensor(1), torch.ones(2).numpy(), torch.zeros(0),
    ]  # fmt: skip
    found = [digest_of(value) for value in values]
    assert len(set(found)) == len(values)
    assert found == [digest_of(copy.deepcopy(value)) for value in values]


# --- several ranks


class OwnAddon(AddOnBase):
    """Keep by hand what each rank has of its own, and draw from it."""

    unsaved_attributes = ("mine", "seen")  # But by its own state_dict.
    layer = "observe"
    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mine: Any = None

    def on_run_begin(self) -> None:
        super().on_run_begin()
        if self.mine is None:
            self.mine = {"number": 100 + self.rank, "tensor": torch.full((3,), float(self.rank))}

    def checkpoint(self) -> None:
        super().checkpoint()
        if getattr(self, "fails", False) and self.progress_checker.step == 3:
            raise ArithmeticError("in the epoch's middle")

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.mine = {"number": self.mine["number"] + 10, "tensor": self.mine["tensor"] + 10}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "OwnAddon": {"mine": self.mine}}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        own, rest = self.take(state, "OwnAddon", strict)
        super().load_state_dict(rest, strict)
        self.mine = own["mine"]


class DrawAddon(AddOnBase):
    """Declare the same, beside what is the same on every rank."""

    layer = "loop"
    state_attributes = ("epochs",)
    rank_state_attributes = ("drawn",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epochs, self.drawn = 0, -1

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.epochs += 1
        self.drawn = 1000 * (1 + self.rank) + self.epochs


class ShowAddon(AddOnBase):
    """Record what each rank holds as a run begins."""

    layer = "observe"
    outside = ("OwnAddon",)

    def on_run_begin(self) -> None:
        super().on_run_begin()
        held = getattr(self, "mine", None) or {"number": -1, "tensor": torch.zeros(1)}
        found = (held["number"], held["tensor"][0].item(), self.epochs, self.drawn)
        self.log_history.append({"step": -1, "ranks": repr(self.gather(found))})


def shown(trainer: Any) -> list[Any]:
    return [eval(row["ranks"]) for row in trainer.log_history if "ranks" in row]


def spawned(folder: Path, devices: int = 2, **options: Any) -> Any:
    model = network()
    cls = Task.add_on(MultiGPUAddon, StateManagerAddon, OwnAddon, DrawAddon, ShowAddon)
    optimizer = SGD(model.parameters(), lr=0.1)
    return cls(model, ["cpu"] * devices, optimizer=optimizer, save_path=folder, seed=3, **options)


def test_each_rank_gets_its_own_state_back(tmp_path: Path, caplog: Any) -> None:
    """In the next call of run, and after a resume; on another number of ranks with a warning that names the add-ons."""
    with forks():
        trainer = spawned(tmp_path)
        trainer.run(1, loader(16))
        trainer.run(1, loader(16))
        second = [(110, 10.0, 1, 1001), (111, 11.0, 1, 2001)]
        assert shown(trainer) == [[(100, 0.0, 0, -1), (101, 1.0, 0, -1)], second]
        assert trainer.mine["number"] == 120
        resumed = spawned(tmp_path, resume="auto")
        for _ in range(3):  # The script makes the calls of run that it had made, and one more.
            resumed.run(1, loader(16))
        assert shown(resumed)[-1] == [(120, 20.0, 2, 1002), (121, 21.0, 2, 2002)]
        state = resumed.state_dict()
    entries = [each["add_ons"] for each in state["MultiGPUAddon"]["ranks"]]
    assert [each["OwnAddon"]["mine"]["number"] for each in entries] == [130, 131]
    assert [each["DrawAddon"] for each in entries] == [{"drawn": 1003}, {"drawn": 2003}], "what is shared is saved once"
    fewer = spawned(tmp_path, 1, resume="auto", reshard=True)
    for _ in range(4):
        fewer.run(1, loader(16))
    assert (fewer.mine["number"], fewer.drawn) == (140, 1004)
    assert "the state of DrawAddon, OwnAddon was saved for each of 2 ranks and cannot be divided" in caplog.text


def test_the_state_that_one_rank_has_saved_alone_is_not_taken_in_silence(tmp_path: Path) -> None:
    """After an exception no rank asks the others: what a resume then lacks is said, by the add-ons' names."""
    with forks():
        trainer = spawned(tmp_path)
        trainer.fails = True
        with pytest.raises(ArithmeticError):
            trainer.run(2, loader(16))
        (crash,) = tmp_path.glob("crash-*")
        handler = logging.FileHandler(tmp_path / "said")
        logging.getLogger("zae").addHandler(handler)
        try:
            spawned(tmp_path / "again", resume=crash).run(2, loader(16))
        finally:
            logging.getLogger("zae").removeHandler(handler)
    said = [line for line in (tmp_path / "said").read_text().splitlines() if "takes the state of" in line]
    assert len(said) == 1
    assert re.search(r"rank (\d) takes the state of DrawAddon, OwnAddon from rank (?!\1)\d", said[0])


# --- generators


class MixAddon(AddOnBase):
    """Mix the samples of a batch, and add noise to the gradients."""

    layer = "loop"

    def to_device(self, batch: Any) -> Any:
        x, y = super().to_device(batch)
        order = torch.randperm(len(x), generator=self.generator("mix"))
        return x + 0.1 * x[order], y

    def clip(self) -> None:
        for p in self.parameters:
            p.grad.add_(0.1 * torch.randn(p.shape, generator=self.generator("noise", per_rank=False)))
        super().clip()


class EqualAddon(AddOnBase):
    """Record which generators are in the same state on all ranks."""

    layer = "observe"

    def on_run_end(self) -> None:
        super().on_run_end()
        names = {"noise": False, "mix": True}
        states = [self.gather(self.generator(k, per_rank=v).get_state().tolist()) for k, v in names.items()]
        self.log_history.append({"step": -1, "equal": repr([each[0] == each[-1] for each in states])})


def mixed(*add_ons: Any, devices: Any = "cpu", **options: Any) -> Any:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    return Task.add_on(MixAddon, *add_ons)(model, devices, optimizer=optimizer, **{"seed": 3, **options})


def drawn(trainer: Any, name: str = "mix") -> list[float]:
    return torch.rand(3, generator=trainer.generator(name, per_rank=name != "noise")).tolist()


def test_a_generator_follows_seed_rank_and_name() -> None:
    a, b, c = mixed(), mixed(), mixed(seed=4)
    assert a.generator("mix") is a.generator("mix")
    assert drawn(a) == drawn(b) != drawn(a)
    assert drawn(mixed()) not in (drawn(mixed(), "noise"), drawn(c))
    torch.manual_seed(5)
    first = drawn(mixed(seed=None))
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    assert drawn(mixed(seed=None)) == first != drawn(mixed(seed=6)), "without seed=, torch.manual_seed decides"
    assert torch.equal(torch.get_rng_state(), stream)


def test_generators_resume_bitwise(tmp_path: Path) -> None:
    """Also where they are first asked for after the resume; the state of another seed is continued all the same."""
    straight = mixed()
    straight.run(3, loader())
    first = mixed(StateManagerAddon, save_path=tmp_path)
    first.run(None, loader(), max_steps=8)
    again = mixed(StateManagerAddon, save_path=tmp_path, resume="auto", seed=None)
    again.run(3, loader())
    assert digest(again.model) == digest(straight.model)
    assert (drawn(again), drawn(again, "late")) == (drawn(straight), drawn(straight, "late"))


def test_a_copy_of_a_trainer_goes_on_with_its_generators() -> None:
    trainer = mixed()
    kept = trainer.generator("mix")
    trainer.run(1, loader())
    twin, state = copy.deepcopy(trainer), trainer.state_dict()
    after = drawn(trainer)
    assert drawn(twin) == after
    trainer.load_state_dict(state)
    assert trainer.generator("mix") is kept, "an add-on may hold the object"
    assert drawn(trainer) == after
    trainer.load_state_dict({key: value for key, value in state.items() if key != "generators"})
    assert drawn(trainer) == drawn(mixed()), "a state from before anyone had asked"


def test_an_evaluation_moves_no_generator() -> None:
    one, other = mixed(), mixed()
    one.run(2, loader(), loader())
    other.run(2, loader())
    assert digest(one.model) == digest(other.model)
    assert one.evaluate(loader(shuffle=False)) == one.evaluate(loader(shuffle=False))


def test_a_trainer_without_add_ons_takes_a_state_with_generators() -> None:
    trainer = mixed()
    trainer.run(1, loader())
    model = network()
    plain = Task(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1))
    state = trainer.state_dict()
    plain.load_state_dict(state)
    assert digest(plain.model) == digest(trainer.model)


def test_generators_of_two_ranks_without_a_seed(tmp_path: Path) -> None:
    """Those of gradients agree all the same; another number of ranks derives new seeds from a state."""
    add_ons = (MultiGPUAddon, StateManagerAddon, EqualAddon)
    with forks():
        trainer = mixed(*add_ons, devices=["cpu"] * 2, seed=None, save_path=tmp_path)
        trainer.run(1, loader(16))
    assert trainer.log_history[-1]["equal"] == "[True, False]", "gradients are the same on the ranks, samples are not"
    options = {"save_path": tmp_path, "resume": "auto", "reshard": True}
    alone = mixed(*add_ons, devices=["cpu"], **options)
    alone.run(2, loader(16))
    assert alone.progress_checker.epoch == 2


def test_an_add_on_that_draws_passes_the_kit() -> None:
    check_addon(MixAddon)
