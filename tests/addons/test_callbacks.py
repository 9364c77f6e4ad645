"""CallbackAddon: plain objects, and callbacks with the signature of Transformers and Forgather."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from kit import hand
from kit.faults import forked
from kit.table import Watcher
from zae import ConfigError, Trainer
from zae.addons import AMPAddon, CallbackAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon
from zae.addons.callbacks.calls import EVENTS, FOREIGN_EVENTS
from zae.addons.callbacks.trainer_state import TrainerControl
from zae.errors import MissingError


class Task(Trainer):
    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    test_step = train_step

    def predict_step(self, batch):
        return self.model(batch[0])


def data(size=12):
    rng = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 2, generator=rng), torch.randn(size, 1, generator=rng))


def trainer_of(*callbacks, add_ons=(), lr=0.1, **options):
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    cls = Task.add_on(CallbackAddon, *add_ons)
    return cls(model, "cpu", optimizer=optimizer, log_bar=False, callbacks=list(callbacks), **options)


class ForeignRecorder:
    """Records each event of Transformers, with epoch and step."""

    def __init__(self):
        self.rows = []


class PlainRecorder(ForeignRecorder):
    """Records each event of zae, with what it is given."""


def _foreign(event):
    def method(self, args, state, control, **kwargs):
        self.rows.append((event, round(state.epoch, 3), state.global_step))

    return method


def _plain(event):
    def method(self, trainer, **given):
        self.rows.append((event, trainer.progress_checker.step, *given))

    return eval(f"lambda self, trainer{''.join(f', {name}' for name in EVENTS[event])}: method(self, trainer, "
                f"{', '.join(f'{name}={name}' for name in EVENTS[event])})", {"method": method})  # fmt: skip


for _event in FOREIGN_EVENTS:
    setattr(ForeignRecorder, _event, _foreign(_event))
for _event in FOREIGN_EVENTS.keys() - EVENTS.keys():
    setattr(PlainRecorder, _event, None)
for _event in EVENTS:
    setattr(PlainRecorder, _event, _plain(_event))


def test_events_of_transformers_in_its_order():
    """The order of transformers.Trainer, substeps of a window included; read off its source and a run of it."""
    recorder = ForeignRecorder()
    trainer = trainer_of(recorder, add_ons=(GradientAccumulationAddon,), gradient_accumulation_steps=2)
    trainer.run(1, DataLoader(data(), 4), DataLoader(data(), 6))
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    assert [event for event, *_ in recorder.rows] == [
        "on_init_end", "on_train_begin", "on_epoch_begin", *step, *(name for name in step if "sub" not in name),
        "on_epoch_end", "on_log", "on_prediction_step", "on_prediction_step", "on_log", "on_evaluate", "on_log",
        "on_train_end",
    ]  # fmt: skip
    assert ("on_step_end", 0.667, 1) in recorder.rows
    assert ("on_epoch_end", 1.0, 2) in recorder.rows
    state = trainer.state
    assert (state.max_steps, state.num_train_epochs, state.train_batch_size, state.eval_steps) == (2, 1, 4, 2)
    assert state.best_metric == trainer.best["score"]
    assert state.is_world_process_zero
    assert state.is_local_process_zero
    train, valid, end = state.log_history
    assert {**train, "loss": 0} == {"loss": 0, "learning_rate": 0.1, "epoch": 1.0, "step": 2}
    assert valid["eval_loss"] == state.best_metric
    assert end["train_loss"] == pytest.approx(train["loss"])
    assert end["train_runtime"] > 0


def test_plain_objects_have_the_events_of_zae(tmp_path):
    recorder = PlainRecorder()
    trainer = trainer_of(recorder, add_ons=(StateManagerAddon,), save_path=tmp_path)
    trainer.run(1, DataLoader(data(), 6), DataLoader(data(), 6))
    step = lambda n: [("on_step_begin", n, "batch"), ("on_step_end", n + 1, "outputs")]  # noqa: E731
    assert recorder.rows == [
        ("on_run_begin", 0), ("on_epoch_begin", 0), *step(0), *step(1), ("on_log", 2, "metrics", "step"),
        ("on_validation_begin", 2), ("on_log", 2, "metrics", "step"), ("on_validation_end", 2, "metrics"),
        ("on_epoch_end", 2), ("on_save", 2, "path"), ("on_run_end", 2),
    ]  # fmt: skip
    trainer.load_state()
    assert recorder.rows[-1] == ("on_load", 2, "path")


class Stream(IterableDataset):
    """Rows that have no length."""

    def __iter__(self):
        return iter(data())


class Batches:
    """Batches of a loader of one's own, which has no length either."""

    dataset = Stream()

    def __iter__(self):
        return iter(DataLoader(data(), 4))

    def __len__(self):
        raise NotImplementedError("the length is not known")


@pytest.mark.parametrize("callbacks", [(), (ForeignRecorder,)], ids=["none", "one"])
@pytest.mark.parametrize("loader", [DataLoader(Stream(), 4), Batches()], ids=["IterableDataset", "own"])
def test_a_loader_whose_length_raises(loader, callbacks):
    """Training, validation, evaluate and predict; the speeds that need a length are left out."""
    trainer = trainer_of(*callbacks)
    trainer.run(2, loader, {"a": loader, "b": DataLoader(data(), 4)})
    trainer.evaluate(loader)
    trainer.predict(loader)
    valid = next(row for row in trainer.state.log_history if "eval_b_loss" in row)
    end = next(row for row in trainer.state.log_history if "train_runtime" in row)
    assert valid["eval_b_loss"] > 0
    assert [key for key in valid if "per_second" in key] == []
    assert end.keys() == {"train_runtime", "train_steps_per_second", "total_flos", "train_loss", "epoch", "step"}


class Asks:
    """Sets one flag at one step, and notes where the others are then."""

    def __init__(self, flag, step, event="on_step_end"):
        self.flag, self.step, self.rows = flag, step, []
        setattr(self, event, self._ask)

    def _ask(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            setattr(control, self.flag, True)
            return control

    def on_log(self, args, state, control, logs, **kwargs):
        self.rows.append(("log", state.global_step, *(key for key in logs if "loss" in key)))

    def on_save(self, args, state, control, **kwargs):
        self.rows.append(("save", state.global_step))


@pytest.mark.parametrize(
    ("flag", "expected", "steps"),
    [
        ("should_log", [("log", 2, "loss")], 12),
        ("should_evaluate", [("log", 2, "eval_loss")], 12),
        ("should_save", [("save", 2)], 12),
        ("should_epoch_stop", [], 10),
        ("should_training_stop", [("save", 2), ("log", 2, "train_loss")], 2),
    ],
)
def test_a_flag_is_obeyed_at_its_step(flag, expected, steps, tmp_path):
    asks = Asks(flag, 2)
    trainer = trainer_of(asks, add_ons=(StateManagerAddon,), save_path=tmp_path, save_every=100, log_every=100)
    metrics = trainer.run(3, DataLoader(data(), 3), DataLoader(data(), 6), valid_every=100)
    assert asks.rows[: len(expected)] == expected
    assert metrics["step"] == steps
    assert metrics["epoch"] == (0 if flag == "should_training_stop" else 3)
    if flag == "should_training_stop":
        assert metrics["stop_reason"] == "the callback Asks set should_training_stop in on_step_end"


def test_callbacks_come_and_go_in_a_run():
    late, seen = ForeignRecorder(), []

    class Adds:
        def on_step_end(self, trainer, outputs):
            if trainer.progress_checker.step == 2:
                trainer.add_callback(late)
            if trainer.progress_checker.step == 4:
                seen.append(trainer.pop_callback(ForeignRecorder))
                seen.append(trainer.pop_callback(ForeignRecorder))
                trainer.remove_callback(Adds)

    trainer = trainer_of(Adds)
    trainer.run(2, DataLoader(data(), 4))
    assert seen == [late, None]
    assert trainer.callbacks == []
    assert {step for _, _, step in late.rows} == {2, 3}
    assert late.rows[-1][0] == "on_optimizer_step"


@pytest.mark.parametrize(
    ("callbacks", "found"),
    [
        ("abc", r"callbacks='abc'; write a list of them"),
        ([object()], r"a object without a method named as an event"),
        ([lambda: None], r"a function without a method named as an event"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks, found):
    with pytest.raises(ConfigError, match=found):
        Task.add_on(CallbackAddon)(nn.Linear(2, 1), "cpu", mode="test", callbacks=callbacks)


def test_none_is_no_callbacks() -> None:
    """As other libraries take it, whose scripts pass it on."""
    assert Task.add_on(CallbackAddon)(nn.Linear(2, 1), "cpu", mode="test", callbacks=None).callbacks == []


def method(name, function):
    return type("Mine", (), {name: function})


@pytest.mark.parametrize(
    ("callback", "found"),
    [
        (method("on_step_ends", lambda self, trainer: None), r"Mine.on_step_ends would never be called.*'on_step_end'"),
        (method("on_step_end", lambda self, trainer: None), r"write def on_step_end\(self, trainer, outputs\) or def "),
        (method("on_train_begin", lambda self, trainer: None), r"def on_train_begin\(self, args, state, control, \*\*"),
        (method("on_epoch_end", lambda self, args, state, control, metrics: None), r"missing a required .*'metrics'"),
        (
            method("on_epoch_end", lambda self, args, state, control, tokenizer, **more: None),
            r"keywords are model, pro",
        ),
    ],
)
def test_a_method_that_would_not_be_called_is_refused(callback, found):
    with pytest.raises(ConfigError, match=found):
        trainer_of(callback)


def test_an_instance_is_there_once():
    one = ForeignRecorder()
    trainer = trainer_of(one)
    with pytest.raises(ConfigError, match="ForeignRecorder is there already"):
        trainer.add_callback(one)
    trainer.add_callback(ForeignRecorder)
    assert len(trainer.callbacks) == 2
    with pytest.raises(ConfigError, match="is not among the callbacks"):
        trainer.remove_callback(ForeignRecorder())


def test_an_error_names_the_callback_and_the_event():
    class Fails:
        def on_step_end(self, args, state, control, **kwargs):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError) as error:
        trainer_of(Fails).run(1, DataLoader(data(), 4))
    assert "zae: raised by the callback Fails, in on_step_end" in error.value.__notes__


def test_what_cannot_be_done_warns_once(caplog):
    class Wishes:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_evaluate = True

    with caplog.at_level(logging.WARNING, "zae"):
        trainer_of(Wishes).run(2, DataLoader(data(), 4))
    told = [each.getMessage() for each in caplog.records]
    assert told == [
        "the callback Wishes set should_save, and there is no StateManagerAddon: nothing is saved",
        "the callback Wishes set should_evaluate, and run() has no valid_loader: nothing is evaluated",
    ]


class Counts:
    """Keeps numbers by each of the two ways."""

    state_attributes = ("steps", "losses")

    def __init__(self):
        self.steps, self.losses = 0, []

    def on_step_end(self, trainer, outputs):
        self.steps += 1
        self.losses.append(outputs[0].loss.item())


class Decides:
    """Ends an epoch after a count of its own."""

    def __init__(self):
        self.left = 5

    def on_step_end(self, args, state, control, **kwargs):
        self.left -= 1
        control.should_epoch_stop = self.left == 0

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("killed_at", [1, 4, 5, 6, 8])
def test_a_resume_in_mid_epoch_is_bitwise_with_the_state_of_callbacks(killed_at, tmp_path):
    """Also where the checkpoint is of the very step after which a callback ends the epoch (the 5th); with SIGKILL."""

    class Kills:
        def on_step_begin(self, trainer, batch):
            if trainer.progress_checker.step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def make(folder, *more, **options):
        made = trainer_of(Counts, Decides, *more, add_ons=(StateManagerAddon,), save_path=folder, save_every=1,
                          seed=3, **options)  # fmt: skip
        return made, DataLoader(data(), 3, shuffle=True)

    whole, loader = make(tmp_path / "whole")
    whole.run(3, loader)
    cut, loader = make(tmp_path / "cut", Kills)
    assert forked(cut.run, 3, loader).status == -signal.SIGKILL
    resumed, loader = make(tmp_path / "cut", resume=True)
    resumed.run(3, loader)
    assert hand.digest(resumed.model.weight) == hand.digest(whole.model.weight)
    assert resumed.progress_checker.step == whole.progress_checker.step == 9
    assert [vars(each) for each in resumed.callbacks] == [vars(each) for each in whole.callbacks]
    steps = [(row["step"], row.get("loss")) for row in whole.state.log_history]
    assert [(row["step"], row.get("loss")) for row in resumed.state.log_history] == steps


@pytest.mark.parametrize("flags", [("should_save", "should_training_stop"), ("should_training_stop",)], ids=len)
def test_what_a_callback_saves_and_stops_is_resumed(flags, tmp_path, caplog):
    """A callback that stops alone, as early stopping does, has ended the run."""

    class Stops:
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                for flag in flags:
                    setattr(control, flag, True)

    def script(*callbacks):
        trainer = trainer_of(*callbacks, add_ons=(StateManagerAddon,), save_path=tmp_path, resume="auto")
        return trainer, trainer.run(2, DataLoader(data(), 4))["step"]

    assert script(Stops)[1] == 2
    caplog.set_level(logging.INFO, "zae")
    resumed, step = script(Stops)
    assert step == (6 if len(flags) == 2 else 2)
    assert ("already finished" in caplog.text) == (len(flags) == 1)
    whole = trainer_of()
    whole.run(2, DataLoader(data(), 4))
    assert torch.equal(resumed.model.weight, whole.model.weight) == (len(flags) == 2)


def test_evaluate_and_predict_have_their_events():
    """Each once, after its batches, with no flag obeyed; the metrics have Transformers' prefix."""
    recorder, found = ForeignRecorder(), []

    class Keeps:
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            control.should_training_stop = True
            found.append(metrics)

    trainer, loader = trainer_of(recorder, Keeps), DataLoader(data(), 6)
    metrics = trainer.evaluate(loader)
    trainer.predict(loader)
    assert [event for event, *_ in recorder.rows] == [
        "on_init_end", "on_prediction_step", "on_prediction_step", "on_log", "on_evaluate",
        "on_prediction_step", "on_prediction_step", "on_predict",
    ]  # fmt: skip
    assert found[0]["eval_loss"] == metrics["loss"]
    assert {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"} < found[0].keys()
    assert trainer.run(1, loader)["step"] == 2


@pytest.mark.parametrize("within", [False, True])
def test_evaluate_and_predict_call_no_event_of_a_run(within):
    events = []

    class Tells(Task):
        def on_validation_begin(self):
            events.append("begin")

        def on_validation_end(self, metrics):
            events.append("end")

    class Asks:
        def on_step_end(self, trainer, outputs):
            if within:
                look(trainer)

    def look(trainer):
        trainer.evaluate(loader)
        trainer.evaluate({"a": loader, "b": loader})
        trainer.predict(loader)
        trainer.inference(loader)

    loader, recorder, model = DataLoader(data(), 6), PlainRecorder(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    trainer = Tells.add_on(CallbackAddon)(
        model, "cpu", optimizer=optimizer, log_bar=False, callbacks=[recorder, Asks()]
    )
    trainer.run(1, loader)
    before = [event for event, *_ in recorder.rows]
    assert before.count("on_step_end") == 2
    assert not any("validation" in event for event in before)
    look(trainer)
    assert [event for event, *_ in recorder.rows] == before
    assert not events
    trainer.run(1, loader, loader)
    assert events == ["begin", "end"]


def test_callbacks_that_only_look_change_nothing(tmp_path):
    """With mixed precision, windows, an average and checkpoints: weights and average are bitwise those without them."""
    model_and_average = []
    for callbacks in ([], [Watcher, PlainRecorder, ForeignRecorder]):
        trainer = trainer_of(
            *callbacks, add_ons=(AMPAddon, GradientAccumulationAddon, EMAAddon, StateManagerAddon), precision="bf16",
            gradient_accumulation_steps=2, seed=3, save_path=tmp_path / str(len(callbacks)), save_every=1,
        )  # fmt: skip
        trainer.run(2, DataLoader(data(), 3, shuffle=True), DataLoader(data(), 6, shuffle=True), valid_every=1)
        model_and_average.append([hand.digest(trainer.model.weight), *map(hand.digest, trainer.average.values())])
    assert trainer.callbacks[0].calls > 10_000
    assert min(len(each.rows) for each in trainer.callbacks[1:]) > 20
    assert model_and_average[0] == model_and_average[1]


@pytest.mark.parametrize("event", ["on_step_end", "on_save", "on_evaluate", "on_log", "on_train_end"])
def test_a_callback_that_raises_leaves_checkpoints_whole(event, tmp_path):
    """The error names callback, event and step; the run resumes to the weights of the one without it."""

    class Fails:
        def __init__(self):
            setattr(self, event, self._fail)

        def _fail(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise ZeroDivisionError("mine")

    def make(name, *callbacks, **options):
        made = trainer_of(Counts, *callbacks, add_ons=(StateManagerAddon,), save_path=tmp_path / name, save_every=2,
                          seed=3, **options)  # fmt: skip
        return made, (2, DataLoader(data(), 3, shuffle=True), DataLoader(data(), 6)), {"max_steps": 6, "valid_every": 2}

    whole, args, options = make("whole")
    whole.run(*args, **options)
    cut, args, options = make("cut", Fails)
    with pytest.raises(ZeroDivisionError) as error:
        cut.run(*args, **options)
    notes = "\n".join(error.value.__notes__)
    assert f"zae: raised by the callback Fails, in {event}" in notes
    resumed, args, options = make("cut", resume=True)
    resumed.run(*args, **options)
    assert hand.digest(resumed.model.weight) == hand.digest(whole.model.weight)
    assert resumed.callbacks[0].losses == whole.callbacks[0].losses
    assert resumed.progress_checker.step == 6


def test_a_flag_that_control_does_not_have_is_named():
    """One that is misspelt would do nothing."""
    control = TrainerControl()
    with pytest.raises(MissingError, match=r"control has no 'should_sav'; did you mean 'should_save'\?"):
        control.should_sav = True
    control.should_save = control.own_note = True
    assert control.flags() == ["should_save"]
