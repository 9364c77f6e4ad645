"""Weights & Biases: the real client, offline, read back from its files; and servers that do not serve."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import wandb

from kit.faults import wait_for
from kit.loggers import (
    Killed,
    Task,
    bare,
    build,
    digest,
    finished_wandb_records,
    forked,
    lines,
    loader,
    server,
    wandb_history,
    wandb_records,
    warned,
)
from kit.rank_tasks import forks
from zae import AddOnRequirement, ConfigError, LoggerError
from zae.addons import StateManagerAddon
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon
from zae.addons.loggers.neptune_logger import NeptuneLoggerAddon
from zae.addons.loggers.wandb_logger import WandBLoggerAddon
from zae.addons.mpu import MultiGPUAddon

KEY = "canary0" * 5 + "canar"  # 40 characters, as a key of wandb has


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Nobody is logged in, and no setting of the machine is seen."""
    for name in list(os.environ):
        if name.startswith("WANDB_") and name != "WANDB_SERVICE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wait_for(lambda: wandb.run is None)  # A thread that was given up leaves the client a moment later.


def offline(**more):
    """The option for a local run; the client would continue in the folder of its first run in the process."""
    return {"wandb": {"project": "p", "mode": "offline", "dir": os.getcwd(), **more}}


def logger(**options):
    """A trainer that logs to W&B, offline; a busy machine may take its time."""
    return build(WandBLoggerAddon, **{"web_logger": offline(), "logger_timeout": 30.0, **options})


def test_every_record_is_read_back():
    """In order and none dropped, with validations between and over two calls of run, which are one W&B run."""
    trainer = logger()
    trainer.run(2, loader(5), loader(1), valid_every=3)
    trainer.run(1, loader(5), loader(1), valid_every=2)
    rows = wandb_history()
    assert bare(rows) == bare(trainer.log_history)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert len(rows) == 15 + 3 + 2
    run_id = trainer.state_dict()["LoggerAddon"]["run_id"]
    assert {path.name for path in Path("wandb").glob("*run-*/*.wandb")} == {f"run-{run_id}.wandb"}


def test_charts_are_drawn_over_our_own_step():
    logger().run(1, loader(2))
    (path,) = Path("wandb").glob("*run-*/*.wandb")
    defined = [record.metric for record in finished_wandb_records(path) if record.WhichOneof("record_type") == "metric"]
    assert {(m.name or m.glob_name, m.step_metric) for m in defined} >= {("step", ""), ("*", "step")}


def test_the_config_is_that_of_the_trainer():
    entries = offline(config={"mine": 3, "hub_token": "canary-config"}, name="named")
    logger(web_logger=entries, gradient_clip=0.5).run(1, loader(2))
    (path,) = Path("wandb").glob("*run-*/*.wandb")
    (run,) = [record.run for record in finished_wandb_records(path) if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.display_name, run.project) == ("named", "p")
    assert (config["mine"], config["gradient_clip"], config["composition"]) == (3, 0.5, ["WandBLoggerAddon"])
    assert config["hub_token"] == "***"
    assert "web_logger" not in config


def test_the_weights_are_those_without_a_logger():
    plain = build()
    plain.run(2, loader())
    trainer = logger()
    trainer.run(2, loader())
    assert digest(trainer) == digest(plain)


def train_until(at):
    """Train, killed at a step or to the end, and leave the identifier of the run."""
    Killed.at = at
    entries = {"wandb": {"project": "p", "mode": "offline"}}
    saving = {"save_path": "saved", "save_every": 3, "keep_best": 0, "resume": "auto"}
    add_ons = (WandBLoggerAddon, StateManagerAddon)
    trainer = build(*add_ons, task=Killed, web_logger=entries, logger_timeout=120.0, **saving)
    trainer.run(3, loader(), loader(1), valid_every=2)
    Path("run_id").write_text(trainer.state_dict()["LoggerAddon"]["run_id"])


def test_killed_and_resumed_no_record_is_lost(monkeypatch):
    """The resumed process continues with the same W&B run, and what a checkpoint counts on is on the disk."""
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # The processes start the client's service themselves.
    statuses = [forked(lambda at=at: train_until(at)) for at in (8, None)]
    assert statuses == [-signal.SIGKILL, 0]
    run_id = Path("run_id").read_text()
    paths = sorted(Path("wandb").glob("*run-*/*.wandb"))
    assert len(paths) == 2
    assert {path.name for path in paths} == {f"run-{run_id}.wandb"}
    first, second = (wandb_history([path], wandb_records) for path in paths)
    assert [row["step"] for row in second if "train/loss" in row] == list(range(7, 13))
    whole = build()
    whole.run(3, loader(), loader(1), valid_every=2)
    kept = [row for row in first if row["step"] <= 6] + second  # what came after the checkpoint came again
    assert bare(kept) == bare(whole.log_history)


def test_two_ranks_are_one_run(tmp_path):
    """Rank 0 alone starts a run and writes; the caller's trainer knows its name then, and would continue with it."""
    options = {"jsonl_path": "run.jsonl", "web_logger": offline(), "logger_timeout": 30.0}
    trainer = build(MultiGPUAddon, JSONLLoggerAddon, WandBLoggerAddon, device=["cpu", "cpu"], **options)
    with forks():
        trainer.run(1, loader())
    (path,) = Path("wandb").glob("*run-*/*.wandb")
    assert path.name == f"run-{trainer.state_dict()['LoggerAddon']['run_id']}.wandb"
    assert [row["step"] for row in wandb_history()] == [1, 2]
    assert bare(lines(Path("run.jsonl"))) == bare(trainer.log_history) == bare(wandb_history())


# ------------------------------------------------------------------------------------------------- faults

FAULT = """
import logging, os, sys, time, traceback, wandb  # Once, for all forks.
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
sys.path.insert(0, {tests!r})
from kit.loggers import build, digest, loader
from zae.addons.loggers.wandb_logger import WandBLoggerAddon

def train(url, required):
    os.makedirs(folder := url.rsplit(":", 1)[1] + str(required))
    os.chdir(folder)
    os.environ["WANDB_BASE_URL"] = url
    sys.stdout = open("out", "w")
    os.dup2(os.open("err", os.O_CREAT | os.O_WRONLY), 2)
    trainer = build(WandBLoggerAddon, web_logger={{"wandb": {{"project": "p"}}}}, logger_required=required,
                    logger_timeout=3.0)
    begin = time.monotonic()
    trainer.run(3, loader())
    took = time.monotonic() - begin
    assert digest(trainer) == expected
    print(took, flush=True)

plain = build()
plain.run(3, loader())
expected = digest(plain)
children = []
for url in sys.argv[1:]:
    for required in (False, True)[: 1 + (url == sys.argv[1])]:
        if (pid := os.fork()) == 0:
            train(url, required)  # and leave as any script does, with what the client has registered for the end
            sys.exit()
        children.append(pid)
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.mark.exhaustive
def test_fault_servers_that_do_not_serve(tmp_path, monkeypatch):
    """Refused, never answered, always 500: one warning, every record local, same weights, exit 0; or an error."""
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    code = FAULT.format(tests=str(Path(__file__).parents[2]))
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(server(kind)) for kind in ("refuses", "silent", "500")]
        done = subprocess.run([sys.executable, "-c", code, *urls], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["0", "1", *["0"] * (len(urls) - 1)], done.stderr
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    port = urls[0].rsplit(":", 1)[1]
    assert "LoggerError: the logger wandb failed" in Path(port + "True", "err").read_text()
    for url in urls:
        port = url.rsplit(":", 1)[1]
        assert float(Path(port + "False", "out").read_text()) < 30  # 3 s for the client, and not for each record.
        told = [t for t in Path(port + "False", "err").read_text().splitlines() if t.startswith("WARNING zae")]
        assert len(told) == 2
        assert "wandb failed" in told[0]
        assert "WANDB_BASE_URL" in told[0]
        assert "12 records of wandb were kept" in told[1]
        (path,) = Path(port + "False", "zae-offline").iterdir()
        assert [row["step"] for row in lines(path)] == list(range(1, 13))


def test_fault_the_real_client_raises_at_step_7(monkeypatch, caplog):
    plain = build()
    plain.run(3, loader())
    real = wandb.Run.log

    def log(self, data, *args, **kwargs):
        if data["step"] == 7:
            raise wandb.Error(f"bad {KEY}")
        real(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", log)
    trainer = logger(web_logger=offline(api_key=KEY))
    trainer.run(3, loader())
    assert digest(trainer) == digest(plain)
    failed, told = warned(caplog)
    assert "wandb failed: Error: bad ***" in failed
    assert "6 records of wandb" in told
    assert [row["step"] for row in wandb_history()] == list(range(1, 7))
    assert [row["step"] for row in lines(next(Path("zae-offline").iterdir()))] == list(range(7, 13))


def test_fault_a_finish_that_blocks(monkeypatch, caplog):
    real = wandb.Run.finish
    released = threading.Event()
    monkeypatch.setattr(wandb.Run, "finish", lambda self, **kwargs: (released.wait(600), real(self, **kwargs)))
    trainer = logger(logger_timeout=15.0)
    close = trainer._close_sinks

    def close_soon():
        trainer.logger_timeout = 2.0  # The client has been opened and has all records.
        close()

    monkeypatch.setattr(trainer, "_close_sinks", close_soon)
    begin = time.monotonic()
    trainer.run(1, loader())
    assert time.monotonic() - begin < 100
    (failed,) = warned(caplog)
    assert "its close() has not returned within" in failed
    released.set()  # the client gets out of it by itself
    assert len(wandb_history()) == 4


@pytest.mark.parametrize("required", [False, True])
def test_fault_the_package_is_missing(monkeypatch, required):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(AddOnRequirement, match=r'pip install "zae\[wandb\]"'):
        logger(logger_required=required)


def test_fault_nobody_is_logged_in(monkeypatch, tmp_path):
    for entries in ({}, {"mode": "online"}, {"settings": {"mode": "online"}}, {"settings": wandb.Settings()}):
        with pytest.raises(AddOnRequirement, match="log in with: wandb login"):
            logger(web_logger={"wandb": entries})
    logger(web_logger={"wandb": {"api_key": KEY}})
    logger(web_logger={"wandb": {"settings": {"api_key": KEY}}})
    logger(web_logger={"wandb": {"settings": wandb.Settings(mode="offline")}})
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    logger(web_logger={"wandb": {}})
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger(web_logger={"wandb": {}})
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai\n login user\n password {KEY}\n")
    (tmp_path / "home" / ".netrc").chmod(0o600)
    logger(web_logger={"wandb": {}})
    monkeypatch.setenv("WANDB_BASE_URL", "https://user:canary@elsewhere.example")
    with pytest.raises(AddOnRequirement, match=r"no API key for https://\*\*\*@elsewhere.example"):
        logger(web_logger={"wandb": {}})
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    logger(web_logger={"wandb": {}})


def test_disabled_writes_nothing():
    trainer = logger(web_logger={"wandb": {"mode": "disabled"}})
    trainer.run(1, loader())
    assert not Path("wandb").exists()


def test_disabled_by_the_environment(monkeypatch, caplog):
    """A user who writes WANDB_DISABLED=true sends nothing; wandb itself reads that no more."""
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    logger(web_logger={"wandb": {"project": "p", "mode": "offline"}}).run(1, loader())
    assert not Path("wandb").exists()
    assert "failed" not in caplog.text


def test_no_home_folder(monkeypatch):
    """A container may have a user without a home."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for mode in ("online", "offline"):
        with pytest.raises(AddOnRequirement, match=r"HOME is not set.*; set HOME to a folder that can be written"):
            logger(web_logger={"wandb": {"mode": mode}})
    logger(web_logger={"wandb": {"mode": "disabled"}})
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(Path.cwd() / name))
    with pytest.raises(AddOnRequirement, match="log in with: wandb login"):
        logger(web_logger={"wandb": {}})


def test_an_entry_that_wandb_does_not_take():
    trainer = logger(web_logger={"wandb": {"mode": "offline", "projct": "p"}})
    with pytest.raises(ConfigError, match=r"'projct' that wandb.init does not take; did you mean 'project'\?"):
        trainer.run(1, loader())
    assert trainer.progress_checker.step == 0


def test_settings_of_the_clients_own_class():
    settings = wandb.Settings(mode="offline", run_notes="noted")
    logger(web_logger={"wandb": {"project": "p", "dir": os.getcwd(), "settings": settings}}).run(1, loader(2))
    (path,) = Path("wandb").glob("*run-*/*.wandb")
    (run,) = [record.run for record in finished_wandb_records(path) if record.WhichOneof("record_type") == "run"]
    assert run.notes == "noted"
    assert len(wandb_history()) == 2


def test_a_run_of_the_users_own_is_used_and_left_open():
    with wandb.init(mode="offline", project="p", id="mine", dir=os.getcwd()) as own:
        logger().run(1, loader())
        assert wandb.run is own
    assert {path.name for path in Path("wandb").glob("*run-*/*.wandb")} == {"run-mine.wandb"}
    assert [row["step"] for row in wandb_history()] == [1, 2, 3, 4]


def test_a_failed_run_is_marked(monkeypatch):
    class Failing(Task):
        def train_step(self, batch):
            raise RuntimeError("mine")

    trainer = logger(task=Failing)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.run(1, loader())
    (path,) = Path("wandb").glob("*run-*/*.wandb")
    ends = [record for record in finished_wandb_records(path) if record.WhichOneof("record_type") == "exit"]
    (code,) = [record.exit.exit_code for record in ends]
    assert code == 1


def test_no_secret_is_written_anywhere(tmp_path, caplog, capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-environment")
    entries = offline(api_key=KEY, notes="see hf_canarycanary", config={"password": "canary-p"})
    trainer = build(WandBLoggerAddon, StateManagerAddon, save_path="saved", web_logger=entries, logger_timeout=30.0)
    trainer.run(1, loader())
    assert "canary" not in repr(trainer) + str(trainer.state_dict()) + caplog.text + "".join(capfd.readouterr())
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"canary" not in file.read_bytes(), file


def test_fault_required_raises_for_a_client_that_fails(monkeypatch):
    def init(project=None, mode=None, dir=None, api_key=None, **kwargs):
        raise wandb.Error(f"no {KEY}")

    monkeypatch.setattr(wandb, "init", init)
    trainer = logger(web_logger=offline(api_key=KEY), logger_required=True)
    with pytest.raises(LoggerError, match=r"wandb failed: Error: no \*\*\*;") as caught:
        trainer.run(1, loader())
    assert trainer.progress_checker.step == 0
    assert "canary" not in str(caught.value)


def test_two_web_loggers_have_the_same_records():
    """Both web loggers get the same records; in either order, as it is one class."""
    from test_neptune_logger import QUIET, series

    entries = {**offline(), "neptune": {"mode": "offline", **QUIET}}
    trainer = build(NeptuneLoggerAddon, WandBLoggerAddon, web_logger=entries, logger_timeout=30.0)
    trainer.run(2, loader(), loader(1))
    rows = wandb_history()
    found = series()
    names = {name for row in rows for name in row if name != "step"}
    assert {name: found[name] for name in names} == {
        name: [(row["step"], row[name]) for row in rows if name in row] for name in names
    }
    assert len(rows) == 10
