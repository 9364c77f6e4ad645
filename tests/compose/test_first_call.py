"""A hook without ``super()`` is seen in its first call: whatever the hook, and however ``super()`` is called."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import sys
import threading
from typing import Any

import pytest
import torch

from zae import AddOnBase, AddOnError, TaskError, Trainer, replaces
from zae.addons import EMAAddon, StateManagerAddon
from zae.compose.introspect import hooks_of

BATCHES = list(torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0)))


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class Failing(Task):
    """Fails in its third step."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == 2:
            raise RuntimeError("the third step")
        return super().train_step(batch)


def make(cls: Any, **options: Any) -> Any:
    model = torch.nn.Linear(3, 1)
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options)


def add_on(name: str, hook: str, method: Any, layer: str = "observe") -> Any:
    return type(Task)(name, (AddOnBase,), {"layer": layer, hook: method})


def passing(hook: str) -> Any:
    """Return an add-on near the loop that overrides a hook and calls ``super()``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(inside, self), hook)(*args, **kwargs)

    inside = add_on("InsideAddon", hook, method, layer="loop")
    return inside


def around_the_step(tmp_path: Any, cls: Any) -> None:
    """Train with validations, saves and a resume, so that each hook of a run is called."""
    options = {"save_path": tmp_path, "save_every": 2, "log_every": 1} if issubclass(cls, StateManagerAddon) else {}
    make(cls, **options).run(2, BATCHES, BATCHES, valid_every=2)
    if options:
        make(cls, **options, resume="auto").run(3, BATCHES, BATCHES)


SILENT = """setup teardown checkpoint on_run_begin on_run_end on_epoch_begin on_epoch_end on_validation_begin
    on_validation_end on_save on_load log logging scheduler_step load_state_dict materialize wrap_optimizers zero_grad
    on_step_begin on_step_end"""
ANSWERS = {
    "validate": {"loss": 1.0}, "state_dict": {}, "epoch_context": contextlib.nullcontext(), "describe": [],
    "evaluation_context": contextlib.nullcontext(), "check_better": True, "steps_per_epoch": 4, "sample_weight": 1.0,
    "metric_on_epoch_end": {}, "evaluation_batches": BATCHES, "batches": iter(BATCHES), "wrap_loader": BATCHES,
}  # fmt: skip


@pytest.mark.parametrize("hook", [*SILENT.split(), *ANSWERS])
def test_a_forgotten_super_is_named_in_any_hook(hook: str, tmp_path: Any) -> None:
    answer = ANSWERS.get(hook)
    inside = passing(hook)
    around_the_step(tmp_path / "right", Task.add_on(inside, StateManagerAddon))
    outside = add_on("OutsideAddon", hook, lambda self, *args, **kwargs: copy.copy(answer))
    cls = Task.add_on(outside, inside, StateManagerAddon)
    match = rf"OutsideAddon.{hook} overrides a hook without calling super\(\), and so skips what [\w, ]+ do(es)? there;"
    with pytest.raises(AddOnError, match=rf"{match} call super\(\).{hook}\(\.\.\.\), or mark"):
        around_the_step(tmp_path / "wrong", cls)
    assert sys.getprofile() is None


@pytest.mark.parametrize("hook", ["setup", "checkpoint", "validate", "log", "on_epoch_end", "clip"])
def test_a_task_is_named_where_it_skips_an_add_on_and_else_is_free(hook: str) -> None:
    answer = {"loss": 1.0} if hook == "validate" else None
    method = {hook: lambda self, *args: answer}
    if hook != "setup":
        make(type(Task)("Free", (Task,), method).add_on(passing(hook))).run(1, BATCHES, BATCHES)
    above = type(Task)("Above", (Task.add_on(passing(hook)),), method)
    with pytest.raises(TaskError, match=rf"Above.{hook} overrides a hook .* skips what InsideAddon does there"):
        make(above).run(1, BATCHES, BATCHES)


@pytest.mark.parametrize("alone", [True, False])
def test_entries_that_a_state_lacks_are_named_at_the_first_save(alone: bool, tmp_path: Any) -> None:
    class ForgetsAddon(AddOnBase):
        layer = "control"

        def state_dict(self) -> dict[str, Any]:
            return {"ForgetsAddon": 1}

    add_ons = [ForgetsAddon, StateManagerAddon, *([] if alone else [EMAAddon])]
    options: dict[str, Any] = {"save_path": tmp_path, "save_every": 1} | ({} if alone else {"decay": 0.5})
    left_out = "what StateManagerAddon does there" if alone else "what StateManagerAddon, EMAAddon do there"
    with pytest.raises(AddOnError, match=rf"ForgetsAddon.state_dict .* skips {left_out}; call super\(\).state_dict"):
        make(Task.add_on(*add_ons), **options).run(1, BATCHES)


@pytest.mark.parametrize("hook", ["state_dict", "load_state_dict"])
def test_it_is_named_where_a_user_saves_and_loads(hook: str, tmp_path: Any) -> None:
    make(Task.add_on(StateManagerAddon), save_path=tmp_path).save_state(tmp_path / "saved")
    outside = add_on("OutsideAddon", hook, lambda self, *args: {}, layer="control")
    trainer = make(Task.add_on(outside, StateManagerAddon), save_path=tmp_path)
    with pytest.raises(AddOnError, match=rf"OutsideAddon.{hook} overrides a hook without calling super"):
        trainer.save_state() if hook == "state_dict" else trainer.load_state(tmp_path / "saved")


def test_a_super_that_is_never_reached_is_named() -> None:
    class NeverAddon(AddOnBase):
        def on_epoch_end(self) -> None:
            if False:
                super().on_epoch_end()

    class SeldomAddon(AddOnBase):
        def on_step_end(self, outputs: Any) -> None:
            if self.progress_checker.step % 10 == 0:
                super().on_step_end(outputs)

    with pytest.raises(AddOnError, match=r"NeverAddon.on_epoch_end .*It may be there, and was not reached in the firs"):
        make(Task.add_on(NeverAddon, passing("on_epoch_end"))).run(1, BATCHES)
    with pytest.raises(AddOnError, match=r"SeldomAddon.on_step_end .*let no condition stand before it"):
        make(Task.add_on(SeldomAddon, passing("on_step_end"))).run(1, BATCHES)
    SeldomAddon.on_step_end = replaces(SeldomAddon.on_step_end)  # type: ignore[method-assign]
    assert make(Task.add_on(SeldomAddon, passing("on_step_end"))).run(1, BATCHES)["step"] == 4


# ------------------------------------------------------------------------------------------ however it is called


def plain(function: Any) -> Any:
    """Decorate without ``functools.wraps``."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def clip_of(cls: Any, trainer: Any) -> None:
    super(cls, trainer).clip()


class InAddon(AddOnBase):
    """Is inside of the others, and called in each of their ways."""

    layer = "loop"

    @plain
    def clip(self) -> None:
        super().clip()

    @contextlib.contextmanager
    def forward_context(self) -> Any:
        with super().forward_context():
            yield

    def batches(self, loader: Any) -> Any:
        yield from super().batches(loader)

    @torch.no_grad()
    def unscale(self) -> None:
        super().unscale()

    @property
    def should_stop(self) -> bool:
        return super().should_stop


class ByHelperAddon(AddOnBase):
    def clip(self) -> None:
        clip_of(ByHelperAddon, self)

    def unscale(self) -> None:
        [super(ByHelperAddon, self).unscale() for _ in range(1)]


class ByClassAddon(AddOnBase):
    def clip(self) -> None:
        InAddon.clip(self)

    def forward_context(self) -> Any:
        return InAddon.forward_context(self)


class Once:
    """Asks for its batches when the first one is wanted."""

    def __init__(self, function: Any, loader: Any) -> None:
        self.function, self.loader, self.batches = function, loader, None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.batches = self.batches or self.function(self.loader)
        return next(self.batches)


class ByNameAddon(AddOnBase):
    def clip(self) -> None:
        getattr(super(), "".join("clip"))()

    def batches(self, loader: Any) -> Any:
        return Once(super().batches, loader)

    @property
    def should_stop(self) -> bool:
        return self.progress_checker.step > 2 or super().should_stop


class LazyAddon(AddOnBase):
    @plain
    def clip(self) -> None:
        super().clip()

    def batches(self, loader: Any) -> Any:
        for batch in super().batches(loader):
            yield batch + 0

    @contextlib.contextmanager
    def forward_context(self) -> Any:
        with super().forward_context(), torch.enable_grad():
            yield

    @functools.wraps(Trainer.zero_grad)
    def zero_grad(self) -> None:
        super().zero_grad()


class PutOnAddon(AddOnBase):
    """Gets its methods later."""


def put_on(self: Any) -> None:
    super(PutOnAddon, self).clip()


PutOnAddon.clip = put_on  # type: ignore[method-assign]


@pytest.mark.parametrize("cls", [ByHelperAddon, ByClassAddon, ByNameAddon, LazyAddon, PutOnAddon])
def test_a_super_is_seen_however_it_is_called(cls: Any) -> None:
    trainer = make(Task.add_on(cls, InAddon))
    assert trainer.run(1, BATCHES, BATCHES)["step"] == (3 if cls is ByNameAddon else 4)
    assert sys.getprofile() is None


@plain
def clips_nothing(self: Any) -> None: ...


@contextlib.contextmanager
def calls_another(self: Any) -> Any:
    with self.batch_context():
        yield


class OtherContextAddon(AddOnBase):
    """Has a context of its own, which the same decorator makes."""

    layer = "model"

    @contextlib.contextmanager
    def batch_context(self) -> Any:
        with super().batch_context():
            yield


@pytest.mark.parametrize(
    ("hook", "method"),
    [
        ("clip", clips_nothing),
        ("clip", staticmethod(lambda: None)),
        ("unscale", torch.no_grad()(lambda self: None)),
        ("forward_context", calls_another),
        ("forward_context", lambda self: contextlib.nullcontext()),
        ("batches", lambda self, loader: (each for each in loader)),
        ("should_stop", property(lambda self: False)),
    ],
)
def test_what_a_decorator_makes_is_not_taken_for_the_method_inside(hook: str, method: Any) -> None:
    outside = add_on("OutsideAddon", hook, method)
    with pytest.raises(AddOnError, match=rf"OutsideAddon.{hook} overrides a hook .* skips what InAddon does there"):
        make(Task.add_on(outside, InAddon, OtherContextAddon)).run(1, BATCHES)


# ------------------------------------------------------------------------------------------ what is left of it


def test_nothing_is_left_of_it() -> None:
    """No class is changed, no attribute stays, and neither a copy nor the memory of a trainer knows of it."""

    class CopyingAddon(AddOnBase):
        def on_step_begin(self, batch: Any) -> None:
            super().on_step_begin(batch)
            self.copied = copy.deepcopy(self)

    inside = passing("on_step_begin")
    before = dict(vars(inside))
    trainer = make(Task.add_on(CopyingAddon, inside))
    own = set(vars(trainer))
    trainer.run(1, BATCHES)
    assert dict(vars(inside)) == before
    assert set(vars(trainer)) - own == {"copied"}
    assert set(vars(trainer.copied)) <= set(vars(trainer))
    assert trainer.copied.run(1, BATCHES)["step"] == 4
    again = make(Task.add_on(CopyingAddon, inside))
    with again.ready():  # In this process they were called.
        assert not {"on_step_begin", "clip"} & set(vars(again))


def test_an_error_in_the_first_step_leaves_nothing() -> None:
    class BadAddon(AddOnBase):
        def on_step_end(self, outputs: Any) -> None:
            raise ValueError("bad")

    trainer = make(Task.add_on(BadAddon, passing("on_step_end")))
    own = set(vars(trainer))
    with pytest.raises(ValueError, match="bad"):
        trainer.run(1, BATCHES)
    assert set(vars(trainer)) == own
    assert sys.getprofile() is None


def test_a_profile_function_of_another_is_left_alone() -> None:
    events: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        events.append(event)

    outside = add_on("OutsideAddon", "clip", lambda self: None)
    trainer = make(Task.add_on(outside, passing("clip")))
    sys.setprofile(profile)
    try:
        trainer.run(1, BATCHES)  # Nothing is judged.
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert events
    with pytest.raises(AddOnError, match=r"OutsideAddon.clip overrides"):
        trainer.run(1, BATCHES)


def test_a_profile_function_that_a_hook_sets_stays() -> None:
    def profile(frame: Any, event: str, argument: Any) -> None: ...

    def begin(self: Any) -> None:
        sys.setprofile(profile)

    trainer = make(Task.add_on(add_on("ProfileAddon", "on_run_begin", begin), passing("on_run_begin")))
    try:
        trainer.run(1, BATCHES)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_an_error_that_ends_the_run_goes_on(hook: str) -> None:
    outside = add_on("OutsideAddon", hook, lambda self, *args: None)
    with pytest.raises(RuntimeError, match="the third step") as caught:
        make(Failing.add_on(outside, passing(hook))).run(1, BATCHES)
    assert any(f"OutsideAddon.{hook} overrides a hook" in each for each in caught.value.__notes__)


def test_two_threads_do_not_meet() -> None:
    """A begins its first step, B begins its own, A ends and then B: both are judged, and no class is changed."""
    begun = [threading.Event(), threading.Event()]
    ended = threading.Event()
    said: list[str] = []
    inside = passing("on_step_end")
    before = vars(inside)["on_step_end"]

    def on_step_begin(self: Any, batch: Any) -> None:
        super(outside, self).on_step_begin(batch)
        index = int(threading.current_thread().name)
        begun[index].set()
        assert (begun[1] if index == 0 else ended).wait(20)

    outside = add_on("OutsideAddon", "on_step_begin", on_step_begin)
    outside.on_step_end = lambda self, outputs: None
    cls = Task.add_on(outside, inside)

    def train() -> None:
        if threading.current_thread().name == "1":
            assert begun[0].wait(20)
        try:
            make(cls).run(1, BATCHES)
        except AddOnError as error:
            said.append(str(error))
        ended.set()

    threads = [threading.Thread(target=train, name=str(index)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert ["OutsideAddon.on_step_end overrides" in each for each in said] == [True, True]
    assert vars(inside)["on_step_end"] is before


class PickledAddon(AddOnBase):
    """Is pickled within a run, as a search sends a trainer to a process."""

    sent: Any = None

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.sent = pickle.dumps(self)

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)


def test_a_trainer_is_pickled_within_a_run() -> None:
    trainer = make(Task.add_on(PickledAddon))
    trainer.run(1, BATCHES)
    assert pickle.loads(trainer.sent).run(1, BATCHES)["step"] == 4


def test_only_hooks_with_a_value_need_to_return_one() -> None:
    """Of every hook that says what it returns; the loop says so, and not the line where None cannot be used."""
    needed = {"wrap_model", "wrap_loader", "batches", "to_device", "epoch_context", "check_better", "forward_context"}
    assert needed <= set(hooks_of(Trainer))
    for name in sorted(needed):
        cls = type(Task)("Nothing", (Task,), {name: lambda self, *args: None})
        with pytest.raises(TaskError, match=rf"Nothing.{name} returned None, and the loop needs its return value"):
            make(cls).run(1, BATCHES, BATCHES)
