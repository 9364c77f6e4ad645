"""The base of the loggers: what it hands to the sinks, when it opens and closes them, and what it never costs."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kit.loggers import ListLoggerAddon, ListSink, Task, bare, build, digest, lines, listing, loader, warned
from zae import AddOnBase, AddOnConflict, CheckpointMismatch, ConfigError, LoggerError, OptionError, Trainer, ZaeError
from zae.addons import EMAAddon, JSONLLoggerAddon, StateManagerAddon, TensorBoardLoggerAddon
from zae.addons.loggers.logger import LoggerAddon, WebLoggerAddon
from zae.addons.loggers.neptune_logger import NeptuneLoggerAddon
from zae.addons.loggers.wandb_logger import WandBLoggerAddon
from zae.description import describe
from zae.parts import Engine
from zae.values.redact import redact


class Drawing(ListSink):
    """Draw from every random stream where it may, and fail where it is told."""

    def __init__(self, fails_at=None, blocks_at=None):
        super().__init__()
        self.fails_at, self.blocks_at, self.free = fails_at, blocks_at, threading.Event()

    def draw(self):
        torch.rand(3)
        np.random.rand(3)
        __import__("random").random()

    def load(self):
        self.draw()

    def open(self, info):
        self.draw()
        super().open(info)

    def write(self, metrics, step):
        if step == self.fails_at:
            raise OSError("the server is gone")
        if step == self.blocks_at:
            self.free.wait(600)
        super().write(metrics, step)

    def close(self, failed):
        self.draw()


@pytest.mark.parametrize("sink", [ListSink(), Drawing(), Drawing(fails_at=7), Drawing(blocks_at=7)])
def test_fault_the_weights_are_those_without_a_logger(caplog, sink):
    plain = build()
    plain.run(2, loader(), loader(2))
    expected, after = digest(plain), torch.rand(1)
    trainer = listing(sink, logger_timeout=0.5)
    trainer.run(1, loader(), loader(2))
    trainer.run(1, loader(), loader(2))
    assert digest(trainer) == expected
    getattr(sink, "free", threading.Event()).set()
    for thread in threading.enumerate():
        if thread.name == "zae-loggers":
            thread.join(120)  # One that comes back now draws nothing either.
            assert not thread.is_alive()
    assert torch.equal(torch.rand(1), after)


def test_fault_a_logger_that_raises_at_step_7(caplog):
    """One warning, all records kept from then on, and their number at the end."""
    trainer = listing(Drawing(fails_at=7))
    trainer.run(3, loader())
    failed, told = warned(caplog)
    assert "OSError: the server is gone" in failed
    kept = next(Path("zae-offline").iterdir())
    assert kept.name == f"list-{trainer.state_dict()['LoggerAddon']['run_id']}.jsonl"
    assert [row["step"] for row in lines(kept)] == list(range(7, 13))
    assert [step for _, step in ListLoggerAddon.sink.rows] == list(range(1, 7))
    assert "6 records" in told


def test_fault_a_sink_that_has_failed_costs_its_time_once(caplog):
    """Not once for each call of run."""
    sink = Drawing()
    sink.open = lambda info: sink.free.wait(600)
    trainer = listing(sink, logger_timeout=1.0)
    begin = time.monotonic()
    for _ in range(20):
        trainer.run(1, loader(2))
    assert time.monotonic() - begin < 15
    sink.free.set()
    assert len([text for text in warned(caplog) if "failed" in text]) == 1
    assert [row["step"] for row in lines(next(Path("zae-offline").iterdir()))] == list(range(1, 41))


def test_fault_required_stops_the_run():
    trainer = listing(Drawing(fails_at=7), logger_required=True)
    with pytest.raises(LoggerError, match="the server is gone") as caught:
        trainer.run(3, loader())
    assert isinstance(caught.value, ZaeError)
    assert trainer.progress_checker.step == 7


def test_what_a_record_holds():
    trainer = listing()
    trainer.run(2, loader(2), loader(1))
    rows = ListLoggerAddon.sink.rows
    assert [(step, row["epoch"], row["batch"]) for row, step in rows] == [
        (1, 1, 1), (2, 1, 2), (2, 1, 2), (3, 2, 3), (4, 2, 4), (4, 2, 4),
    ]  # fmt: skip
    assert set(rows[0][0]) == {"epoch", "batch", "train/loss", "lr"}
    assert set(rows[2][0]) == {"epoch", "batch", "valid/loss"}
    assert bare([{"step": step, **row} for row, step in rows]) == bare(trainer.log_history)


def test_steps_never_fall():
    """Also with validations between, and over two calls of run."""
    trainer = listing()
    trainer.run(2, loader(5), loader(1), valid_every=3)
    trainer.run(1, loader(5), loader(1), valid_every=2)
    steps = [step for _, step in ListLoggerAddon.sink.rows]
    assert steps == sorted(steps)
    assert len(steps) == 15 + 3 + 2


def test_nothing_that_is_handed_over_is_a_tensor():
    trainer = listing()
    trainer.setup()
    leaf = torch.ones((), requires_grad=True)
    metrics = {"loss": leaf * 2, "np": np.float32(0.5), "flag": True, "n": 3, "many": torch.ones(2), "text": "x" * 999,
               "none": None, "complex": 1j}  # fmt: skip
    trainer.log(metrics, 1)
    trainer.teardown()
    ((row, _),) = ListLoggerAddon.sink.rows
    assert row["loss"] == 2.0
    assert type(row["loss"]) is float
    assert (row["np"], row["flag"], row["n"]) == (0.5, True, 3)
    assert all(type(value) in (bool, int, float, str) for value in row.values())
    assert len(row["text"]) == 200


def test_only_the_main_rank_logs():
    class SecondRank(Engine):
        rank = 1

    class SecondRankAddon(AddOnBase):
        """Pretend to be rank 1."""

        layer = "parallel"

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.engine = SecondRank(self.engine)

    ListLoggerAddon.sink = ListSink()
    trainer = build(ListLoggerAddon, SecondRankAddon)
    trainer.run(2, loader(), loader(1))
    assert not ListLoggerAddon.sink.calls
    assert trainer._group is None


def test_one_run_in_two_calls():
    """The sinks are opened before the first batch, closed at the end, and told that the run continues."""
    trainer = listing()
    trainer.run(1, loader())
    trainer.run(1, loader())
    calls = [call for call in ListLoggerAddon.sink.calls if call[0] in ("open", "close")]
    assert [call[0] for call in calls] == ["open", "close", "open", "close"]
    first, second = calls[0][1], calls[2][1]
    assert (first.id, first.continued, first.resumed_at, first.records) == (second.id, False, None, None)
    assert (second.continued, second.resumed_at, second.records) == (True, None, None)
    assert calls[1] == ("close", False)
    assert not [t for t in threading.enumerate() if t.name == "zae-loggers" and (t.join(120) or t.is_alive())]


def test_a_failed_run_is_told():
    class Failing(Task):
        def train_step(self, batch):
            if self.progress_checker.step == 2:
                raise RuntimeError("mine")
            return super().train_step(batch)

    ListLoggerAddon.sink = ListSink()
    trainer = build(ListLoggerAddon, task=Failing)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.run(1, loader())
    assert ListLoggerAddon.sink.calls[-1] == ("close", True)
    assert len(ListLoggerAddon.sink.rows) == 2


def test_evaluation_starts_no_run():
    trainer = listing()
    trainer.evaluate(loader(1))
    trainer.inference(loader(1))
    assert not ListLoggerAddon.sink.calls


def test_mode_test_logs_its_means():
    trainer = listing(mode="test")
    trainer.run(1, loader(1))
    assert [call[0] for call in ListLoggerAddon.sink.calls] == ["open", "write", "close"]


def test_workers_of_a_loader_are_forked_beside_the_threads():
    trainer = listing()
    inputs = torch.ones(8, 3)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, num_workers=1)
    trainer.run(2, data)
    assert [step for _, step in ListLoggerAddon.sink.rows] == [1, 2, 3, 4]


def test_no_sinks_no_thread():
    trainer = build(LoggerAddon)
    before = threading.active_count()
    trainer.setup()
    trainer.on_run_begin()
    assert threading.active_count() == before
    trainer.teardown()
    assert trainer.state_dict()["LoggerAddon"]["run_id"] is None


# ------------------------------------------------------------------------------------------------------ the state


def test_a_resumed_run_goes_on_with_its_name():
    trainer = listing()
    trainer.run(1, loader(3))
    state = trainer.state_dict()
    assert set(state["LoggerAddon"]) == {"run_id", "records"}
    other = listing(seed=None)
    other.load_state_dict(state)
    assert other.state_dict()["LoggerAddon"] == state["LoggerAddon"]
    other.run(1, loader(3))
    info = ListLoggerAddon.sink.calls[0][1]
    assert (info.id, info.continued, info.resumed_at, info.records) == (state["LoggerAddon"]["run_id"], True, 3, 3)
    assert other.state_dict()["LoggerAddon"]["records"] == 6


def test_the_sinks_have_flushed_before_a_state_is_saved(tmp_path):
    ListLoggerAddon.sink = ListSink()
    trainer = build(ListLoggerAddon, StateManagerAddon, save_path=tmp_path / "s", save_every=2)
    trainer.run(1, loader(4))
    names = [call[0] for call in ListLoggerAddon.sink.calls]
    assert names.count("flush") >= 3
    # The state is tried after the first step, and saved after the second.
    assert names[:5] == ["open", "write", "flush", "write", "flush"]


def test_a_state_that_is_loaded_in_a_run_opens_the_sinks_anew():
    class Rewinding(Task):
        def on_epoch_begin(self):
            super().on_epoch_begin()
            if self.progress_checker.epoch == 0:
                self.kept = copy.deepcopy(self.state_dict())
            elif self.kept:
                kept, self.kept = self.kept, None
                self.load_state_dict(kept)

    ListLoggerAddon.sink = ListSink()
    build(ListLoggerAddon, task=Rewinding).run(2, loader(2))
    opened = [call[1] for call in ListLoggerAddon.sink.calls if call[0] == "open"]
    assert [info.resumed_at for info in opened] == [None, 0]
    assert opened[1].records == 0


def test_the_state_of_a_run_without_logger_is_welcome():
    plain = build()
    plain.run(1, loader())
    trainer = listing()
    trainer.load_state_dict(plain.state_dict())
    trainer.run(1, loader())
    info = ListLoggerAddon.sink.calls[0][1]
    assert (info.continued, info.resumed_at) == (False, None)


@pytest.mark.parametrize(
    "own", [{}, None, "x", {"run_id": "../../etc/x", "records": 0}, {"run_id": "a" * 99, "records": 0},
            {"run_id": "a", "records": "b"}, {"run_id": 3, "records": 0}],
)  # fmt: skip
def test_a_hostile_name_is_refused(own):
    trainer = listing()
    state = {**trainer.state_dict(), "LoggerAddon": own}
    if own is None:
        trainer.load_state_dict(state)
        return
    with pytest.raises(CheckpointMismatch, match="LoggerAddon"):
        trainer.load_state_dict(state)


def test_a_trainer_with_open_sinks_travels():
    class Copying(Task):
        def on_epoch_end(self):
            super().on_epoch_end()
            self.twin = copy.deepcopy(self)

    ListLoggerAddon.sink = ListSink()
    trainer = build(ListLoggerAddon, task=Copying)
    trainer.run(1, loader())
    assert trainer.twin._group is None
    assert digest(trainer.twin) == digest(trainer)
    assert pickle.loads(pickle.dumps(listing()))._group is None


# --------------------------------------------------------------------------------------------- options and composition


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"logger_fallback": ""}, "logger_fallback=''; give a folder"),
        ({"logger_fallback": None}, "logger_fallback=None; give a folder"),
    ],
)
def test_options_that_cannot_be_meant(options, text):
    with pytest.raises(ConfigError, match=text.replace("'", ".").replace("(", ".")):
        listing(**options)


def test_a_time_limit_as_good_as_none():
    """More seconds than a lock can wait for."""
    trainer = listing(logger_timeout=1e300)
    trainer.run(1, loader())
    assert trainer.progress_checker.epoch == 1


def test_fault_the_folder_of_the_local_files(caplog, tmp_path):
    trainer = listing(Drawing(fails_at=1), logger_fallback=tmp_path / "elsewhere")
    trainer.run(1, loader())
    assert len(lines(next((tmp_path / "elsewhere").iterdir()))) == 4
    assert not Path("zae-offline").exists()


def test_the_sinks_of_several_loggers_are_independent(caplog):
    """One fails, the other has every record."""

    class OtherLoggerAddon(LoggerAddon):
        """Another logger."""

        other = ListSink()

        def sinks(self):
            return [*super().sinks(), self.other]

    ListLoggerAddon.sink = Drawing(fails_at=2)
    trainer = build(ListLoggerAddon, OtherLoggerAddon, EMAAddon)
    assert type(trainer) is Task.add_on(EMAAddon, OtherLoggerAddon, LoggerAddon, ListLoggerAddon)
    trainer.run(1, loader())
    assert [step for _, step in OtherLoggerAddon.other.rows] == [1, 2, 3, 4]
    assert len(warned(caplog)) == 2


def test_a_sink_list_without_super_is_refused():
    class GreedyLoggerAddon(LoggerAddon):
        def sinks(self):
            return []

    trainer = build(GreedyLoggerAddon, ListLoggerAddon)
    with pytest.raises(TypeError, match=r"GreedyLoggerAddon\.sinks .* call super\(\)\.sinks\("):
        trainer.run(1, loader())
    assert trainer.progress_checker.step == 0


def test_the_config_says_how_the_trainer_was_made():
    trainer = listing(gradient_clip=0.5, monitor="loss", scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 99))
    trainer.run(1, loader())
    config = ListLoggerAddon.sink.calls[0][1].config
    assert config["composition"] == ["ListLoggerAddon"]
    assert (config["device"], config["monitor"], config["gradient_clip"], config["seed"]) == ("cpu", "loss", 0.5, 1)
    assert (config["model"], config["parameters"], config["world_size"]) == ("Sequential", 41, 1)
    assert config["optimizer"]["name"] == "AdamW"
    assert config["optimizer"]["lr"] == 0.01
    assert "web_logger" not in config


# ------------------------------------------------------------------------------------------------------- web_logger


def web(*add_ons, **options):
    return build(*add_ons, **options)


@pytest.mark.parametrize(
    ("add_on", "value", "text"),
    [
        (WandBLoggerAddon, None, 'web_logger is a NoneType; write web_logger={"wandb": {"project": "my-project"}}'),
        (WandBLoggerAddon, "canary", 'web_logger is a str; write web_logger={"wandb"'),
        (WandBLoggerAddon, {}, 'web_logger has no entry "wandb"; write web_logger={"wandb"'),
        (WandBLoggerAddon, {"wandb": "canary"}, 'web_logger has a str for "wandb"; write'),
        (WandBLoggerAddon, {"wanbd": {}}, "unknown entry 'wanbd'; did you mean 'wandb'?"),
        (WandBLoggerAddon, {"wandb": {}, "comet": {}}, "unknown entry 'comet'; available: wandb"),
        (WandBLoggerAddon, {"wandb": {}, "neptune": {}}, "add it: .add_on(NeptuneLoggerAddon)"),
        (NeptuneLoggerAddon, {}, 'web_logger has no entry "neptune"; write web_logger={"neptune"'),
        (NeptuneLoggerAddon, {"neptune": {}, "wandb": {}}, "add it: .add_on(WandBLoggerAddon)"),
        (WebLoggerAddon, {"x": {}}, "unknown entry 'x'"),
    ],
)
def test_web_logger_that_cannot_be_meant(add_on, value, text):
    with pytest.raises(ConfigError) as caught:
        web(add_on, web_logger=value)
    assert text in str(caught.value)
    assert "canary" not in str(caught.value)


def test_all_options_that_are_missing_are_named_at_once():
    cls = Task.add_on(JSONLLoggerAddon, TensorBoardLoggerAddon, WandBLoggerAddon)
    with pytest.raises(OptionError) as caught:
        cls(torch.nn.Linear(1, 1), "cpu")
    text = str(caught.value)
    assert "needs 'web_logger' (WebLoggerAddon), 'log_dir' (TensorBoardLoggerAddon) and 'jsonl_path' (JSON" in text
    assert text.endswith('(..., web_logger={"wandb": {"project": "my-project"}}, log_dir=..., jsonl_path=...)')


def test_both_web_loggers_are_one_class_in_either_order():
    """The order they are named in decides nothing, and each wants its own entry."""
    assert Task.add_on(WandBLoggerAddon, NeptuneLoggerAddon) is Task.add_on(NeptuneLoggerAddon, WandBLoggerAddon)
    with pytest.raises(ConfigError, match='no entry "neptune"'):
        web(NeptuneLoggerAddon, WandBLoggerAddon, web_logger={"wandb": {"mode": "offline"}})


def test_a_web_logger_of_ones_own():
    class PaperLoggerAddon(WebLoggerAddon):
        """Print on paper."""

        web_key = "paper"

    trainer = web(PaperLoggerAddon, web_logger={"paper": {"size": "A4"}})
    assert trainer.web_logger == {"paper": {"size": "A4"}}
    with pytest.raises(ConfigError, match="did you mean 'paper'"):
        web(PaperLoggerAddon, web_logger={"papr": {}})


def test_one_option_has_one_owner():
    class ThiefAddon(AddOnBase):
        """Declare what WebLoggerAddon declares."""

        def __init__(self, *args, web_logger=None, **kwargs):
            super().__init__(*args, **kwargs)

    with pytest.raises(AddOnConflict, match="web_logger"):
        Task.add_on(WandBLoggerAddon, ThiefAddon)


def test_no_secret_in_repr_or_state(tmp_path):
    entries = {
        "wandb": {"mode": "disabled", "api_key": "canary-wandb-key"},
        "neptune": {"mode": "debug", "api_tkn": "canary-neptune-key", "description": "https://me:canary@host"},
    }
    trainer = web(WandBLoggerAddon, NeptuneLoggerAddon, StateManagerAddon, web_logger=entries, save_path=tmp_path / "s")
    assert "canary" not in repr(trainer) + repr(vars(trainer)) + str(trainer.explain())
    assert trainer.web_logger["wandb"]["api_key"] == "canary-wandb-key"  # it is only not shown
    assert "canary" not in str(trainer.state_dict())
    assert "canary" not in str(redact(describe(trainer), trainer._secrets()))
    trainer.save_state()
    for file in (tmp_path / "s").rglob("*"):
        assert file.is_dir() or b"canary" not in file.read_bytes()


def test_a_step_does_not_wait_for_a_logger():
    """A record is handed over, not written, on the path of a step."""
    sink = Drawing(blocks_at=0)
    trainer = listing(sink, logger_timeout=120.0)
    trainer.setup()
    trainer.on_run_begin()
    for step in range(1000):
        trainer.log({"train/loss": 0.5, "lr": 0.1}, step)
    assert sink.rows == []
    sink.free.set()
    trainer.teardown()
    assert len(sink.rows) == 1000


def test_the_trainer_without_loggers_is_untouched():
    assert "LoggerAddon" not in build().state_dict()
    assert not hasattr(Trainer, "sinks")
