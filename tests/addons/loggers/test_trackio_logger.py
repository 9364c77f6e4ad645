"""Trackio: the real client and its database, media, a resume, and mistakes."""

from __future__ import annotations

import secrets
import signal
import sys

import pytest

from kit.loggers import Killed, Task, build, digest, forked, loader
from zae import AddOnRequirement, ConfigError
from zae.addons import StateManagerAddon
from zae.addons.loggers.trackio_logger import TrackioLoggerAddon


@pytest.fixture
def project():
    """A name of its own: the folder of the database is read as trackio is imported."""
    return f"p-{secrets.token_hex(8)}"


def logger(project, *add_ons, **options):
    entries = {"project": project, "name": "first"}
    return build(
        TrackioLoggerAddon, *add_ons, **{"web_logger": {"trackio": entries}, "logger_timeout": 30.0, **options}
    )


def rows(project):
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(project, "first")


def test_every_record_is_read_back_and_nothing_is_printed(project, capfd):
    trainer = logger(project, gradient_clip=0.5)
    trainer.run(2, loader(), loader(1))
    trainer.run(1, loader(), loader(1))
    for name in ("train/loss", "valid/loss", "lr", "grad_norm"):
        logged = [(row["step"], row[name]) for row in trainer.log_history if name in row]
        assert [(row["step"], row[name]) for row in rows(project) if name in row] == logged
    assert capfd.readouterr() == ("", "")


def test_killed_and_resumed_no_record_is_lost(project):
    """What a checkpoint counts on is in the database."""

    def train(at):
        Killed.at = at
        options = {"save_path": "saved", "save_every": 3, "keep_best": 0, "resume": "auto", "seed": None}
        logger(project, StateManagerAddon, task=Killed, **options).run(3, loader())

    assert forked(lambda: train(8)) == -signal.SIGKILL
    before = [row["step"] for row in rows(project)]
    assert before[:6] == list(range(1, 7))
    assert forked(lambda: train(None)) == 0
    assert [row["step"] for row in rows(project)][-6:] == list(range(7, 13))


def test_the_client_logs_what_is_no_record(project):
    class Shown(Task):
        def train_step(self, batch):
            if self.progress_checker.step == 1:
                self.clients["trackio"].log({"mine": 1.0}, step=1)
            return super().train_step(batch)

    logger(project, task=Shown).run(1, loader())
    assert [row["mine"] for row in rows(project) if "mine" in row] == [1.0]


def test_the_weights_are_those_without_it(project):
    plain, logged = build(), logger(project)
    plain.run(1, loader())
    logged.run(1, loader())
    assert digest(plain) == digest(logged)


def test_mistakes_are_refused(monkeypatch, project):
    with pytest.raises(ConfigError, match=r'no project; write web_logger=\{"trackio": \{"project": "my-project"\}\}'):
        build(TrackioLoggerAddon, web_logger={"trackio": {}})
    with pytest.raises(ConfigError, match=r"'projekt' that trackio.init does not take"):
        build(TrackioLoggerAddon, web_logger={"trackio": {"project": project, "projekt": "b"}}).run(1, loader())
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(AddOnRequirement, match=r'pip install "zae\[trackio\]"'):
        logger(project)
