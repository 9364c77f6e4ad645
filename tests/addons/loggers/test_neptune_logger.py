"""Neptune, whose hosted service has ended: the real client, offline and unreachable; and no client at all."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from kit.loggers import Killed, Task, bare, build, digest, forked, lines, loader, server, warned
from zae import AddOnRequirement, ConfigError, LoggerError
from zae.addons import StateManagerAddon
from zae.addons.loggers.neptune_logger import NeptuneLoggerAddon

QUIET = {"capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False, "source_files": []}
OFFLINE = {"neptune": {"mode": "offline", **QUIET}}
CANARY = "canary-neptune-token"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Nobody is logged in."""
    for name in list(os.environ):
        if name.startswith("NEPTUNE_"):
            monkeypatch.delenv(name)


def logger(*add_ons, **options):
    """A trainer that logs with Neptune, offline; a busy machine may take its time."""
    return build(NeptuneLoggerAddon, *add_ons, **{"web_logger": OFFLINE, "logger_timeout": 30.0, **options})


def operations():
    """What the client has stored, in the order of the runs."""
    paths = sorted(Path(".neptune").glob("offline/run__*/data-*.log"), key=lambda p: p.stat().st_ctime)
    return [json.loads(line)["obj"] for path in paths for line in path.read_text().splitlines()]


def series(kind="LogFloats"):
    """Every series, as pairs of step and value."""
    found = {}
    for operation in operations():
        if operation["type"] == kind:
            pairs = [(value["step"], value["value"]) for value in operation["values"]]
            found.setdefault("/".join(operation["path"]), []).extend(pairs)
    return found


def token(url):
    """A token whose server is at a URL."""
    return base64.b64encode(json.dumps({"api_address": url, "api_url": url, "api_key": CANARY}).encode()).decode()


def test_every_record_is_read_back_offline():
    trainer = logger(gradient_clip=0.5)
    trainer.run(2, loader(), loader(1))
    trainer.run(1, loader(), loader(1))
    found = series()
    for name in ("train/loss", "valid/loss", "lr", "grad_norm"):
        assert found[name] == [(row["step"], row[name]) for row in trainer.log_history if name in row]
    assert found["epoch"][-1] == (12, 3)
    assigned = {"/".join(o["path"]): o["value"] for o in operations() if o["type"].startswith("Assign")}
    assert assigned["config/gradient_clip"] == 0.5
    assert assigned["config/composition"] == "['NeptuneLoggerAddon']"


def test_what_neptune_would_skip_is_kept_as_text():

    class Broken(Task):
        def test_step(self, batch):
            return {"a": math.nan, "b": -math.inf}

    logger(task=Broken, mode="test").run(1, loader(1))
    texts = series("LogStrings")
    assert texts["texts/valid/a"] == [(0, "nan")]
    assert texts["texts/valid/b"] == [(0, "-inf")]


def test_killed_and_resumed_no_record_is_lost():
    """What a checkpoint counts on is on the disk; the client itself writes only now and then."""
    random.seed(None)  # The names of two processes' folders are drawn.

    def train(at):
        Killed.at = at
        options = {"save_path": "saved", "save_every": 3, "keep_best": 0, "resume": "auto", "seed": None}
        logger(StateManagerAddon, task=Killed, **options).run(3, loader())

    assert forked(lambda: train(8)) == -signal.SIGKILL
    before = [step for step, _ in series()["train/loss"]]
    assert before[:6] == list(range(1, 7))
    assert forked(lambda: train(None)) == 0
    assert [step for step, _ in series()["train/loss"]][len(before) :] == list(range(7, 13))


def test_a_run_that_goes_on_has_one_name(monkeypatch):
    """The client is given the run's own name, and so continues it on a server, in a second run and after a resume."""
    import neptune

    given, real = [], neptune.init_run

    @functools.wraps(real)
    def init_run(**kwargs):
        given.append(kwargs)
        return real(**kwargs)

    monkeypatch.setattr(neptune, "init_run", init_run)
    trainer = logger()
    trainer.run(1, loader())
    trainer.run(1, loader())
    other = logger()
    other.load_state_dict(trainer.state_dict())
    other.run(1, loader())
    assert len(given) == 3
    assert {kwargs["custom_run_id"] for kwargs in given} == {trainer.state_dict()["LoggerAddon"]["run_id"]}
    logger(web_logger={"neptune": {**OFFLINE["neptune"], "custom_run_id": "mine"}}).run(1, loader())
    assert given[-1]["custom_run_id"] == "mine"


def test_the_weights_are_those_without_a_logger():
    """Its client draws the name of its folder from Python's random stream."""
    plain = build()
    plain.run(2, loader())
    trainer = logger()
    trainer.run(2, loader())
    assert digest(trainer) == digest(plain)


def test_the_package_is_absent(monkeypatch, caplog):
    """One warning, every record in a local file, training continues; an error only where it is required."""
    plain = build()
    plain.run(3, loader())
    monkeypatch.setitem(sys.modules, "neptune", None)
    trainer = logger(web_logger={"neptune": {"project": "w/p", "api_tkn": CANARY}})
    trainer.run(3, loader())
    assert digest(trainer) == digest(plain)
    failed, told = warned(caplog)
    assert "neptune failed" in failed
    assert "TensorBoardLoggerAddon or JSONLLoggerAddon" in failed
    assert "12 records of neptune" in told
    (path,) = Path("zae-offline").iterdir()
    assert bare(lines(path)) == bare(trainer.log_history)
    assert CANARY not in caplog.text
    with pytest.raises(AddOnRequirement, match=r'pip install "zae\[neptune\]"'):
        logger(logger_required=True)


@pytest.mark.parametrize("kind", ["refuses", "silent", "500"])
def test_fault_the_host_is_unreachable(kind, caplog, capfd):
    plain = build()
    plain.run(3, loader())
    with server(kind) as url:
        entries = {"project": "w/p", "api_tkn": token(url), **QUIET}
        trainer = logger(web_logger={"neptune": entries}, logger_timeout=1.5)
        begin = time.monotonic()
        trainer.run(3, loader())
        took = time.monotonic() - begin
    assert took < 15  # To wait for each of the 12 records would take 18 s.
    assert digest(trainer) == digest(plain)
    failed, told = warned(caplog)
    assert "neptune failed" in failed
    assert "hosted service has ended" in failed
    assert "12 records of neptune" in told
    assert [row["step"] for row in lines(next(Path("zae-offline").iterdir()))] == list(range(1, 13))
    for secret in (CANARY, token(url)):
        assert secret not in caplog.text + repr(trainer) + str(trainer.state_dict()) + "".join(capfd.readouterr())


def test_fault_required_raises(caplog):
    with server("refuses") as url:
        entries = {"project": "w/p", "api_token": token(url), **QUIET}
        trainer = logger(web_logger={"neptune": entries}, logger_timeout=1.5, logger_required=True)
        with pytest.raises(LoggerError, match="the logger neptune failed"):
            trainer.run(1, loader())
    assert trainer.progress_checker.step == 0
    assert not warned(caplog)


def test_fault_nobody_is_logged_in(monkeypatch):
    for entries in ({}, {"project": "w/p"}, {"mode": "sync"}):
        with pytest.raises(AddOnRequirement, match=r"no API token; log in with: export NEPTUNE_API_TOKEN"):
            logger(web_logger={"neptune": entries})
    logger(web_logger={"neptune": {"api_token": CANARY}})
    logger(web_logger={"neptune": {"api_tkn": CANARY}})
    monkeypatch.setenv("NEPTUNE_API_TOKEN", CANARY)
    logger(web_logger={"neptune": {}})
    monkeypatch.delenv("NEPTUNE_API_TOKEN")
    monkeypatch.setenv("NEPTUNE_MODE", "offline")
    logger(web_logger={"neptune": {}})


def test_fault_the_real_client_raises_at_step_7(monkeypatch, caplog):
    from neptune.handler import Handler

    real = Handler.append

    def append(self, value, *, step=None, **kwargs):
        if step == 7:
            raise ConnectionError("gone")
        real(self, value, step=step, **kwargs)

    monkeypatch.setattr(Handler, "append", append)
    logger().run(3, loader())
    failed, told = warned(caplog)
    assert "neptune failed: ConnectionError: gone" in failed
    assert "6 records of neptune" in told
    assert [step for step, _ in series()["train/loss"]] == list(range(1, 7))


def test_an_entry_that_neptune_does_not_take():
    trainer = logger(web_logger={"neptune": {"mode": "offline", "projct": "p"}})
    with pytest.raises(ConfigError, match=r"'projct' that neptune.init_run does not take; did you mean 'project'\?"):
        trainer.run(1, loader())


def test_a_failed_run_is_marked():

    class Failing(Task):
        def train_step(self, batch):
            raise RuntimeError("mine")

    trainer = logger(task=Failing)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.run(1, loader())
    failed = [o["value"] for o in operations() if o["path"] == ["sys", "failed"]]
    assert failed[-1] is True


def test_no_secret_is_written_anywhere(tmp_path, caplog, capfd):
    entries = {"mode": "offline", "api_tkn": CANARY, "description": "https://me:canary@host", **QUIET}
    trainer = build(
        NeptuneLoggerAddon, StateManagerAddon, save_path="saved", web_logger={"neptune": entries}, logger_timeout=30.0
    )
    trainer.run(1, loader())
    assert "canary" not in repr(trainer) + str(trainer.state_dict()) + caplog.text + "".join(capfd.readouterr())
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"canary" not in file.read_bytes(), file
