"""search: its trials, what is pruned and what fails, and that one which was killed ends as one that was not."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from kit.faults import forked
from kit.rank_tasks import forks
from kit.searches import Line, batches, make_trainer, outcome, search_saved, train_line
from zae import ConfigError, NonFiniteError
from zae.addons import EarlyStoppingAddon, EMAAddon, JSONLLoggerAddon, MultiGPUAddon, StateManagerAddon
from zae.errors import AddOnRequirement
from zae.search import PruningAddon, load_study, search
from zae.values.walk import tensors_in


@pytest.fixture
def optuna_says_all():
    """Let optuna log at its default level, which the examples of docstrings raise."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    yield
    optuna.logging.set_verbosity(before)


@pytest.mark.usefixtures("optuna_says_all")
def test_a_search(tmp_path, capsys):
    """What is drawn, recorded, shown and read again; the random streams of the script are not moved."""
    states = torch.get_rng_state()
    study = search(train_line, 4, folder=tmp_path / "search", seed=0)
    assert torch.equal(torch.get_rng_state(), states)
    assert study.best_value == min(trial.value for trial in study.trials)
    for trial in study.trials:
        assert trial.state.name == "COMPLETE"
        assert 1e-3 <= trial.params["lr"] <= 0.3
        assert trial.params["epochs"] in (2, 3, 4)
    assert outcome(load_study(tmp_path / "search")) == outcome(study)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trial")]
    assert [line.partition(":")[0] for line in shown] == [f"trial {at} of 4, complete" for at in range(4)]


def test_a_search_that_is_called_again_adds_trials(tmp_path):
    """With a seed, as if all had been asked for at once; those that are there are kept."""
    search(train_line, 2, folder=tmp_path / "a", seed=5)
    numbers = list[int]()

    def objective(trial: optuna.Trial) -> float:
        numbers.append(trial.number)
        return train_line(trial)

    more = search(objective, 4, folder=tmp_path / "a")
    whole = search(train_line, 4, folder=tmp_path / "b", seed=5)
    assert numbers == [2, 3]
    assert outcome(more) == outcome(whole)
    search(objective, 3, folder=tmp_path / "a")
    assert numbers == [2, 3]


@pytest.mark.parametrize("sampler", [None, optuna.samplers.RandomSampler, optuna.samplers.GPSampler], ids=str)
def test_the_same_seed_gives_the_same_trials_and_weights(tmp_path, sampler):
    """Bitwise; the trainers have no seed of their own."""
    first = search(train_line, 4, folder=tmp_path / "a", seed=1, sampler=sampler)
    torch.rand(3)
    second = search(train_line, 4, folder=tmp_path / "b", seed=1, sampler=sampler)
    assert outcome(first) == outcome(second)
    assert len({trial.user_attrs["weights"] for trial in first.trials}) == 4


def search_until(kill_at: str, folder: Path, resume: str | bool) -> None:
    """Run the search of `kit.searches`, which is killed at a place."""
    os.environ["KILL_AT"] = kill_at
    search_saved(folder, resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the trials of the search that is not killed."""
    study = search_saved(tmp_path_factory.mktemp("whole"), "auto")
    assert {"COMPLETE", "PRUNED"} == {trial.state.name for trial in study.trials}
    return outcome(study)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("place", ["step", "draw", "pruned", "end"])
@pytest.mark.parametrize("resume", ["auto", "anew"])
def test_a_search_that_was_killed_ends_as_one_that_was_not(tmp_path, whole, resume, place):
    """SIGKILL in a step, between two draws, after a report that prunes, or before the score is recorded."""
    assert forked(search_until, place, tmp_path, resume == "auto" and "auto").status == -9
    states = [trial.state.name for trial in load_study(tmp_path).trials]
    assert states.count("RUNNING") == 1
    assert states[-1] == "RUNNING"
    with (tmp_path / "search.journal").open("a") as file:
        file.write('{"op_code": 4, "tri')  # It was writing.
    (tmp_path / "search.journal.lock").symlink_to("search.journal")
    assert outcome(search_saved(tmp_path, resume == "auto" and "auto")) == whole


def test_memory_is_given_back(tmp_path):
    """After each trial there are as many tensors as before the first one; a failed trial keeps nothing."""
    references, counts = list[Any](), list[int]()

    def objective(trial: optuna.Trial) -> float:
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        assert all(reference() is None for reference in references)
        trainer = make_trainer(0.1)
        trainer.run(2, batches(), batches())
        objects = (trainer, trainer.unwrap(), *trainer.unwrap().parameters(), *tensors_in(trainer.optimizers))
        references.extend(map(weakref.ref, objects))
        if trial.number == 1:
            raise RuntimeError("after the training")
        return 1.0

    search(objective, 5, folder=tmp_path, seed=0, catch=RuntimeError)
    gc.collect()
    assert len(references) > 15
    assert all(reference() is None for reference in references)
    assert counts[1:] == [counts[1]] * 4
    assert counts[1] - counts[0] <= 2


def test_pruned_trials_stop_cleanly(tmp_path):
    """Their run ends by `stop`, their state and log are whole, and their weights can be loaded without the search."""
    rows = dict[int, Any]()
    addons = (StateManagerAddon, JSONLLoggerAddon, EMAAddon, EarlyStoppingAddon)

    def objective(trial: optuna.Trial) -> float:
        folder = tmp_path / str(trial.number)
        lr = trial.suggest_categorical("lr", [1e-6, 0.1])
        trainer = Line.add_on(*addons, PruningAddon)(
            lambda: torch.nn.Linear(4, 1), "cpu", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
            log_bar=False, seed=0, save_path=folder / "run", jsonl_path=folder / "log.jsonl", patience=50, decay=0.01,
            optuna_trial=trial,
        )  # fmt: skip
        rows[trial.number] = trainer.run(6, batches(), batches())
        return trainer.history.best["score"]

    pruner = optuna.pruners.ThresholdPruner(upper=3.0, n_warmup_steps=10)
    study = search(objective, 6, "minimize", pruner=pruner, folder=tmp_path / "study", seed=1)
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert 0 < len(pruned) < 6
    for trial in pruned:
        assert trial.params["lr"] == 1e-6
        assert rows[trial.number]["stop_reason"] == f"trial {trial.number} is pruned"
        assert rows[trial.number]["epoch"] == 2
        assert trial.value == [*trial.intermediate_values.values()][-1]
        folder = tmp_path / str(trial.number)
        assert not (folder / "run" / ".lock").exists()
        assert json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["step"] == 10
        plain = Line.add_on(*addons)(torch.nn.Linear(4, 1), "cpu", optimizer=torch.optim.SGD,
                                     save_path=tmp_path / "plain", jsonl_path=tmp_path / "plain.jsonl")  # fmt: skip
        plain.load_state(folder / "run")
        assert plain.progress_checker.step == 10
    assert study.best_params == {"lr": 0.1}


def test_reporting_changes_no_weights(tmp_path):
    def objective(trial: optuna.Trial) -> float:
        weights = []
        for kind, options in ((Line, {}), (Line.add_on(PruningAddon), {"optuna_trial": trial})):
            torch.manual_seed(0)
            trainer = make_trainer(0.1, kind=kind, seed=7, **options)
            trainer.run(2, batches(), batches())
            weights.append(trainer.unwrap().state_dict())
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert trial.study.trials[0].intermediate_values.keys() == {5, 10}
        return 1.0

    assert search(objective, 1, folder=tmp_path).best_value == 1


def test_an_error_ends_the_search_and_the_next_call_takes_up_its_trial(tmp_path, caplog):
    """One that ``catch`` names fails its trial alone."""
    fails = {"at": 1}

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("lr", 0.1, 0.2)
        if trial.number == fails["at"]:
            raise RuntimeError("no such layer")
        return rate

    with pytest.raises(RuntimeError, match="no such layer") as caught:
        search(objective, 3, folder=tmp_path, seed=0)
    rate = load_study(tmp_path).trials[1].params["lr"]
    note = caught.value.__notes__[-1]
    assert f"in trial 1 of a search, with {{'lr': {rate}}}" in note
    assert "catch=RuntimeError lets it fail" in note
    study = search(objective, 3, folder=tmp_path, catch=RuntimeError)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[1].user_attrs["error"] == "RuntimeError: no such layer"
    assert f"trial 1 of the search failed: RuntimeError: no such layer; its parameters: {{'lr': {rate}}}" in caplog.text
    fails["at"] = 3
    with pytest.raises(RuntimeError):
        search(objective, 5, folder=tmp_path)
    fails["at"] = -1
    assert [trial.state.name for trial in search(objective, 5, folder=tmp_path).trials[3:]] == ["COMPLETE"] * 2


def test_a_trial_that_diverges_fails(tmp_path):
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise NonFiniteError("the loss is nan")
        return (math.nan, 0.0, 1.5)[trial.number]

    with pytest.warns(UserWarning, match="nan is not acceptable"):
        study = search(objective, 3, folder=tmp_path, seed=0)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "COMPLETE"]
    assert study.best_value == 1.5


def test_several_directions(tmp_path):
    """There is a front, and not one best."""

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        trainer = make_trainer(trial.suggest_float("lr", 1e-3, 0.3), kind=Line.add_on(PruningAddon), optuna_trial=trial)
        trainer.run(2, batches(), batches())
        return trainer.history.valid[-1]["valid_loss"], trainer.history.valid[-1]["valid_accuracy"]

    study = search(objective, 6, ["minimize", "maximize"], folder=tmp_path, seed=0)
    assert [each.number for each in study.best_trials] == [min(study.trials, key=lambda each: each.values[0]).number]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no trials": ({"n_trials": 0}, "n_trials"),
    "folder": ({"folder": 5}, "folder=5; it must be the path of a folder"),
    "seed": ({"seed": -1}, "seed=-1"),
    "no score": ({"objective": lambda trial: None}, "the objective returned None; it must return a number"),
    "two scores": ({"objective": lambda trial: (1, 2)}, r"the objective returned .*; it must return a number"),
    "one score": (
        {"direction": ["minimize", "minimize"], "objective": lambda trial: 1},
        "it must return 2 numbers, one for each direction",
    ),
    "several processes": (
        {
            "objective": lambda trial: Line.add_on(MultiGPUAddon, PruningAddon)(
                torch.nn.Linear(4, 1), ["cpu", "cpu"], optimizer=torch.optim.SGD, optuna_trial=trial
            ).run(1, batches())
        },
        "leave out PruningAddon, or train each trial in one process",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_searched(name, tmp_path):
    changed, said = WRONG[name]
    arguments = {"objective": train_line, "n_trials": 1, "folder": tmp_path, **changed}
    with forks(), pytest.raises(ConfigError, match=said):
        search(**arguments)


def test_a_folder_with_another_search(tmp_path):
    search(train_line, 1, folder=tmp_path / "a", seed=0)
    for changed, said in (
        ({"seed": 1}, "it began with seed=0, and this one has seed=1"),
        ({"direction": "maximize"}, "it began with direction="),
    ):
        with pytest.raises(ConfigError, match=said):
            search(train_line, 2, folder=tmp_path / "a", **changed)
    with pytest.raises(ConfigError, match=r"has no search: search.journal is missing"):
        load_study(tmp_path)

    def objective(trial: optuna.Trial) -> float:
        with pytest.raises(ConfigError, match=r"folder=.* is in use: process .*; give another folder"):
            search(train_line, 1, folder=tmp_path / "b")
        return 1.0

    assert search(objective, 1, folder=tmp_path / "b").best_value == 1


def test_without_optuna(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(AddOnRequirement, match=r"a search needs the package optuna, .*: pip install optuna"):
        search(train_line, 1, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_time_ends_a_search(tmp_path):
    """No further trial begins; the next call goes on."""
    assert len(search(train_line, 50, folder=tmp_path, timeout=1e-9).trials) == 0
    assert len(search(train_line, 1, folder=tmp_path).trials) == 1
