"""MLflow: the real client and its files, images, a resume, a failing server, and no client at all."""

from __future__ import annotations

import math
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from kit.loggers import Killed, Task, build, digest, forked, loader, warned
from zae import AddOnRequirement, ConfigError
from zae.addons import StateManagerAddon
from zae.addons.loggers.mlflow_logger import MLflowLoggerAddon


def logger(*add_ons, folder=None, **options):
    """A trainer that logs into the present folder."""
    entries = {"experiment_name": "digits", "tracking_uri": f"file:{folder or Path('runs').absolute()}"}
    return build(MLflowLoggerAddon, *add_ons, **{"web_logger": {"mlflow": entries}, "logger_timeout": 30.0, **options})


def runs():
    """All runs of the experiment, the newest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file:{Path('runs').absolute()}")
    experiment = client.get_experiment_by_name("digits")
    return client, client.search_runs([experiment.experiment_id])


def history(client, run, key):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)]


def test_every_record_is_read_back():
    trainer = logger(gradient_clip=0.5, hyperparameters={"width": 8, "names": {"a@b": "c"}})
    trainer.run(2, loader(), loader(1))
    trainer.run(1, loader(), loader(1))
    client, (run,) = runs()
    for name in ("train/loss", "valid/loss", "lr", "grad_norm"):
        rows = [(row["step"], row[name]) for row in trainer.log_history if name in row]
        assert sorted(history(client, run, name)) == rows
    assert run.info.status == "FINISHED"
    assert run.data.params["gradient_clip"] == "0.5"
    assert run.data.params["hyperparameters/width"] == "8"
    assert run.data.params["hyperparameters/names/a_b"] == "c"
    assert run.data.tags["zae.torch"] == torch.__version__


def test_names_that_mlflow_refuses_and_values_that_are_not_finite():
    class Odd(Task):
        def test_step(self, batch):
            names = ("a//b", "x/", "/y", "./z", "../up", "w/..", "k" * 300, "k" * 299 + "l", "f1[micro]", "ü:")
            return {"acc@1": 0.5, "nan": math.nan, **dict.fromkeys(names, 1.0)}

    logger(task=Odd, mode="test", hyperparameters={"optimizer/": 1, "k" * 300: 2, "..": 3}).run(1, loader(1))
    client, (run,) = runs()
    assert run.info.status == "FINISHED"
    assert {each.partition("/")[2][:20] for each in run.data.metrics if each.startswith("valid/")} == {
        "acc_1", "nan", "a/_/b", "x/_", "_/y", "_/z", "__/up", "w/__", "k" * 20, "f1_micro_", "ü_"
    }  # fmt: skip
    assert sum(each.startswith("valid/kk") for each in run.data.metrics) == 2
    assert run.data.params["hyperparameters/optimizer/_"] == "1"
    assert history(client, run, "valid/acc_1") == [(0, 0.5)]
    assert math.isnan(history(client, run, "valid/nan")[0][1])


def test_killed_and_resumed_no_record_is_lost():
    def train(at):
        Killed.at = at
        options = {"save_path": "saved", "save_every": 3, "keep_best": 0, "resume": "auto", "seed": None}
        logger(StateManagerAddon, task=Killed, **options).run(3, loader())

    assert forked(lambda: train(8)) == -signal.SIGKILL
    assert forked(lambda: train(None)) == 0
    client, (run,) = runs()
    steps = [step for step, _ in history(client, run, "train/loss")]
    assert set(steps) == set(range(1, 13))
    assert steps[-6:] == list(range(7, 13))
    assert run.info.status == "FINISHED"


def test_the_client_logs_what_is_no_record():
    class Shown(Task):
        def train_step(self, batch):
            if self.progress_checker.step == 1:
                client, run_id = self.clients["mlflow"]
                client.log_text(run_id, "seen", "samples.txt")
                client.set_tag(run_id, "mine", "yes")
            return super().train_step(batch)

    trainer = logger(task=Shown)
    trainer.run(1, loader())
    client, (run,) = runs()
    assert run.data.tags["mine"] == "yes"
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["samples.txt"]
    assert trainer.clients == {}


def test_an_error_is_shown_and_the_weights_are_those_without_it():
    plain, logged = build(), logger()
    plain.run(1, loader())
    logged.run(1, loader())
    assert digest(plain) == digest(logged)

    class Failing(Task):
        def train_step(self, batch):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        logger(task=Failing).run(1, loader())
    assert sorted(run.info.status for run in runs()[1]) == ["FAILED", "FINISHED"]


def test_a_server_that_is_not_there_is_a_warning(caplog, monkeypatch):
    """Its client goes on trying for a while, and draws no random number."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    entries = {"experiment_name": "digits", "tracking_uri": "http://127.0.0.1:9"}
    plain, logged = build(), build(MLflowLoggerAddon, web_logger={"mlflow": entries}, logger_timeout=0.2)
    plain.run(1, loader())
    logged.run(1, loader())
    assert digest(plain) == digest(logged)
    assert "the logger mlflow failed" in warned(caplog)[0]
    state = random.getstate()
    for thread in threading.enumerate():
        if thread.name == "zae-loggers":
            thread.join(120)
            assert not thread.is_alive()
    assert random.getstate() == state
    assert len(list(Path("zae-offline").iterdir())) == 1


def test_mistakes_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r'no experiment_name; write web_logger=\{"mlflow": \{"experiment_name"'):
        build(MLflowLoggerAddon, web_logger={"mlflow": {}})
    with pytest.raises(ConfigError, match=r"'experiment' that .* does not take; did you mean .experiment_name"):
        build(MLflowLoggerAddon, web_logger={"mlflow": {"experiment": "a"}})
    with pytest.raises(ConfigError, match=r"hyperparameters=.*; it must be a dict"):
        logger(hyperparameters=["a"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(AddOnRequirement, match=r'pip install "zae\[mlflow\]"'):
        logger()


def test_a_state_of_a_run_without_it_is_resumed():
    trainer = build(StateManagerAddon, save_path="saved")
    trainer.run(1, loader())
    other = logger(StateManagerAddon, save_path="saved", resume="auto")
    other.run(2, loader())
    assert other.progress_checker.step == 8
    assert len(runs()[1]) == 1
