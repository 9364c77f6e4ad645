"""search: its trials, their folders, what is pruned and what fails, and that one search is like the next."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from kit.hand import digest
from kit.searches import SPACE, Line, batches, make_again, make_saved, make_trainer, run
from zae import ConfigError
from zae.addons import EarlyStoppingAddon, EMAAddon, JSONLLoggerAddon, MultiGPUAddon, StateManagerAddon
from zae.common.walk import tensors_in
from zae.errors import AddOnRequirement
from zae.search import Trial, read, search

TESTS = Path(__file__).parents[1]


def look(found: Any) -> list[Any]:
    """Return all of the trials that does not depend on the time or the folder."""
    return [(each.number, each.state, each.params, each.values, each.reports, each.error) for each in found.trials]


def test_a_search(tmp_path, capsys):
    """What a trial gets, what its folder has, and what is returned, shown and read again."""
    seen, states = list[Any](), torch.get_rng_state()

    def make(trial: Any) -> Any:
        seen.append((trial, trial.folder, trial.folder.exists()))
        return make_trainer(trial)

    found = search(make, SPACE, 4, run=run, folder=tmp_path / "search", seed=0)
    assert torch.equal(torch.get_rng_state(), states)
    assert [folder.name for _, folder, _ in seen] == [f"trial-000{at}" for at in range(4)]
    assert all(exists for *_, exists in seen)
    assert all(isinstance(trial, Trial) for trial, *_ in seen)
    assert found.best_value == min(each.value for each in found.trials)
    assert found.best_params == found.best_trial.params == dict(seen[found.best_trial.number][0])
    for each in found.trials:
        assert each.state == "complete"
        assert 1e-3 <= each.params["lr"] <= 0.3
        assert each.params["epochs"] in (2, 3, 4)
        assert len(each.reports) == each.params["epochs"]
        assert each.value == min(each.reports.values())
        about = json.loads((each.folder / "trial.json").read_text())
        assert (about["number"], about["params"], about["values"]) == (each.number, each.params, each.values)
    assert look(read(tmp_path / "search")) == look(found)
    lines = str(found).splitlines()
    assert lines[0].split() == ["trial", "score", "lr", "bias", "epochs", "state", "time"]
    assert [line.endswith("best") for line in lines[1:5]] == [each is found.best_trial for each in found.trials]
    assert lines[5] == "4 trials: 4 finished"
    assert [each.value for each in found.study().trials] == [each.value for each in found.trials]
    shown = capsys.readouterr().err.splitlines()  # A plain line for each trial, also where it is no terminal.
    assert [line.partition(":")[0] for line in shown] == [f"trial {at} of 4" for at in range(1, 5)]
    assert shown[-1].partition("; best ")[2].startswith(f"{found.best_value:.4g}"[:4])


def test_a_search_that_is_called_again_adds_trials(tmp_path):
    """With a seed, as if all had been asked for at once; those that are there are kept."""
    search(make_trainer, SPACE, 2, run=run, folder=tmp_path / "a", seed=5)
    calls = list[int]()

    def make(trial: Any) -> Any:
        calls.append(trial.number)
        return make_trainer(trial)

    more = search(make, SPACE, 4, run=run, folder=tmp_path / "a")
    whole = search(make_trainer, SPACE, 4, run=run, folder=tmp_path / "b", seed=5)
    assert calls == [2, 3]
    assert look(more) == look(whole)
    search(make, SPACE, 3, run=run, folder=tmp_path / "a")
    assert calls == [2, 3]


@pytest.mark.parametrize("sampler", [None, optuna.samplers.RandomSampler, optuna.samplers.GPSampler], ids=str)
def test_the_same_seed_gives_the_same_weights(tmp_path, sampler):
    """Bitwise; the trainers have no seed of their own, and dropout draws numbers."""
    weights = list[dict[int, str]]()
    for name in ("a", "b"):
        found = dict[int, str]()

        def train(trainer: Any, trial: Any, found: dict[int, str] = found) -> Any:
            run(trainer, trial)
            found[trial.number] = digest(trainer.unwrap())

        search(make_saved, SPACE, 4, run=train, folder=tmp_path / name, seed=1, sampler=sampler)
        weights.append(found)
        torch.rand(3)
    assert weights[0] == weights[1]
    assert len(set(weights[0].values())) == 4


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("make", [make_saved, make_again], ids=["resumes", "begins again"])
def test_a_killed_search_goes_on(tmp_path, make):
    """SIGKILL in the second epoch of trial 2: the end is as without it, and finished trials are not repeated."""
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        f"from kit.searches import *\nfrom zae.search import search\n"
        f"print(search({make.__name__}, SPACE, 4, run=run, folder=sys.argv[1], seed=3, "
        "pruner=__import__('optuna').pruners.MedianPruner(n_startup_trials=3)))"
    )

    def start(folder: Path) -> int:
        return subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True).returncode

    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "die").touch()
    assert start(tmp_path / "killed") == -9
    assert [each.state for each in read(tmp_path / "killed").trials] == ["complete", "complete", "running"]
    first = read(tmp_path / "killed").trials[0]
    with (tmp_path / "killed" / "search.journal").open("a") as file:
        file.write('{"op_code": 4, "tri')  # It was writing.
    epochs = list[int]()

    def train(trainer: Any, trial: Any) -> Any:
        trainer.on_epoch_begin, known = lambda: (epochs.append(trial.number), known())[1], trainer.on_epoch_begin
        return run(trainer, trial)

    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
    again = search(make, SPACE, 4, run=train, folder=tmp_path / "killed", seed=3, pruner=pruner)
    whole = search(make, SPACE, 4, run=run, folder=tmp_path / "whole", seed=3, pruner=pruner)
    assert look(again) == look(whole)
    assert again.trials[0].seconds == first.seconds
    assert set(epochs) == {2, 3}
    assert epochs.count(2) == len(whole.trials[2].reports) - (make is make_saved)


def test_memory_is_given_back(tmp_path):
    """After each trial there are as many tensors as before the first one; a failed trial keeps nothing."""
    models, counts = list[Any](), list[int]()

    def make(trial: Any) -> Any:
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        assert all(each() is None for each in models)
        trainer = make_saved(trial)
        models.extend(weakref.ref(each) for each in (trainer, trainer.unwrap(), *trainer.unwrap().parameters()))
        return trainer

    def train(trainer: Any, trial: Any) -> Any:
        run(trainer, trial)
        models.extend(weakref.ref(each) for each in tensors_in(trainer.optimizers))
        if trial.number == 1:
            raise RuntimeError("after the training")

    search(make, SPACE, 5, run=train, folder=tmp_path, seed=0)
    gc.collect()
    assert len(models) > 15
    assert all(each() is None for each in models)
    assert counts[1:] == [counts[1]] * 4
    assert counts[1] - counts[0] <= 2


def test_pruned_trials_stop_cleanly(tmp_path):
    """Their run ends by `stop`, their state and log are whole, and their weights can be loaded without the search."""
    rows = dict[int, Any]()

    def make(trial: Any) -> Any:
        options = {"save_path": trial.folder / "run", "jsonl_path": trial.folder / "log.jsonl", "patience": 50}
        options["decay"] = 0.01
        made = Line.add_on(StateManagerAddon, JSONLLoggerAddon, EMAAddon, EarlyStoppingAddon)
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=trial["lr"])  # noqa: E731
        return made(lambda: torch.nn.Linear(4, 1), "cpu", optimizer=optimizer, log_bar=False, seed=0, **options)

    def train(trainer: Any, trial: Any) -> Any:
        rows[trial.number] = metrics = trainer.run(6, batches(), batches())
        assert trainer.run(2, batches(), batches())["epoch"] == (8 if not trial.is_pruned else metrics["epoch"])
        return metrics

    pruner = optuna.pruners.ThresholdPruner(upper=3.0, n_warmup_steps=10)
    found = search(make, {"lr": [1e-6, 0.1]}, 6, "minimize", pruner, run=train, folder=tmp_path, seed=1)
    pruned = [each for each in found.trials if each.state == "pruned"]
    assert 0 < len(pruned) < 6
    assert all(each.params["lr"] == 1e-6 for each in pruned)
    for each in pruned:
        assert rows[each.number]["stop_reason"] == f"trial {each.number} is pruned"
        assert rows[each.number]["epoch"] == 2
        assert each.value == [*each.reports.values()][-1]
        assert not (each.folder / "run" / ".lock").exists()
        last = json.loads((each.folder / "log.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 10
        parts = Line.add_on(StateManagerAddon, JSONLLoggerAddon, EMAAddon, EarlyStoppingAddon)
        plain = parts(torch.nn.Linear(4, 1), "cpu", optimizer=torch.optim.SGD, save_path=tmp_path / "plain",
                      jsonl_path=tmp_path / "plain.jsonl")  # fmt: skip
        plain.load_state(each.folder / "run")
        assert plain.progress_checker.step == 10
    assert "pruned" in str(found)
    assert found.best_params == {"lr": 0.1}


def test_the_best_weights_are_those_of_a_run_without_a_search(tmp_path):
    """The search only looks."""
    found = search(make_saved, SPACE, 2, run=run, folder=tmp_path / "search", seed=0)
    best = found.best_trial
    trial = Trial(None, best.params, 9, tmp_path, 0)
    seeds = []

    def make(given: Any) -> Any:
        seeds.append(given.seed)
        return make_trainer(given, seed=7)

    digests = []

    def train(trainer: Any, trial: Any) -> Any:
        metrics = run(trainer, trial)
        digests.append(digest(trainer.unwrap()))
        return metrics

    search(make, SPACE, 2, run=train, folder=tmp_path / "b", seed=0)
    alone = make_trainer(trial, seed=7)
    run(alone, trial)
    assert digest(alone.unwrap()) == digests[best.number]
    assert len({*seeds}) == 2


def test_a_failed_trial_is_reported_and_the_others_go_on(tmp_path, caplog):
    """With its parameters; before one trial has ended, an unexpected error ends the search and keeps the trial."""
    fails = {"at": 0}

    def train(trainer: Any, trial: Any) -> Any:
        if trial.number == fails["at"]:
            raise RuntimeError("no such layer")
        return run(trainer, trial)

    with pytest.raises(RuntimeError, match="no such layer") as caught:
        search(make_trainer, SPACE, 3, run=train, folder=tmp_path, seed=0)
    assert "trial 0 of the search in" in caught.value.__notes__[-1]
    assert "'lr'" in caught.value.__notes__[-1]
    assert [each.state for each in read(tmp_path).trials] == ["running"]
    fails["at"] = 1
    found = search(make_trainer, SPACE, 3, run=train, folder=tmp_path)
    assert [each.state for each in found.trials] == ["complete", "fail", "complete"]
    assert found.trials[1].error == "RuntimeError: no such layer"
    assert f"trial 1 of the search failed: RuntimeError: no such layer; its parameters: {found.trials[1].params}" in (
        caplog.text
    )
    assert "1 failed" in str(found)
    fails["at"] = 3
    with pytest.raises(RuntimeError, match="no such layer"):
        search(make_trainer, SPACE, 5, run=train, folder=tmp_path, catch=KeyError)
    fails["at"] = -1
    assert [each.state for each in search(make_trainer, SPACE, 5, run=train, folder=tmp_path).trials][3:] == (
        ["complete"] * 2
    )


def test_scores_that_are_nan_fail(tmp_path):
    """Those of a trial that diverges; and where all do, the search says so."""

    def train(trainer: Any, trial: Any) -> Any:
        return math.nan if trial.number != 1 else 1.5

    found = search(make_trainer, {"lr": (0.1, 0.2), "bias": [True]}, 3, run=train, folder=tmp_path / "a", seed=0)
    assert [each.state for each in found.trials] == ["fail", "complete", "fail"]
    assert found.best_value == 1.5
    with pytest.raises(
        ConfigError, match=r"all 2 trials .* have failed; the first one: NonFiniteError: .*'lr': 1e\+30"
    ):
        search(make_trainer, {"lr": [1e30], "bias": [True], "epochs": [9]}, 2, run=run, folder=tmp_path / "b")
    with pytest.raises(ConfigError, match=r"no trial of the search in .* has ended with a score"):
        read(tmp_path / "b").best_params  # noqa: B018


def test_ctrl_c_shows_the_table_so_far(tmp_path, caplog):
    def train(trainer: Any, trial: Any) -> Any:
        if trial.number == 2:
            raise KeyboardInterrupt
        return run(trainer, trial)

    with pytest.raises(KeyboardInterrupt):
        search(make_trainer, SPACE, 5, run=train, folder=tmp_path)
    assert "3 trials: 2 finished, 1 interrupted" in caplog.text
    assert "epochs" in caplog.text
    assert {each.state for each in search(make_trainer, SPACE, 5, run=run, folder=tmp_path).trials} == {"complete"}


def test_several_directions(tmp_path):
    """Of an objective that returns two numbers; there is a front, and not one best."""
    found = search(make_trainer, SPACE, 6, ["minimize", "max"], run=run, folder=tmp_path, seed=0,
                   objective=lambda metrics: (metrics["loss"], metrics["accuracy"]))  # fmt: skip
    assert found.directions == ["minimize", "maximize"]
    assert [each.number for each in found.best_trials] == [min(found.trials, key=lambda each: each.values[0]).number]
    assert str(found).splitlines()[0].split()[1:3] == ["score_0", "score_1"]
    with pytest.raises(ConfigError, match="2 directions, and not one best trial: best_trials"):
        found.best_value  # noqa: B018


def test_scores(tmp_path):
    """An objective of the metrics, a number that run returns, and parameters that make_trainer draws."""
    best = search(make_trainer, SPACE, 2, "maximize", run=run, folder=tmp_path / "a", seed=0,
                  objective=lambda metrics: metrics["valid_accuracy"])  # fmt: skip
    assert all(each.value == max(each.reports.values()) <= 1 for each in best.trials)

    def make(trial: Any) -> Any:
        given = {"lr": trial.suggest_float("lr", 0.01, 0.1), "bias": True, "twice": 2}
        return make_trainer({**given})

    found = search(make, None, 2, run=lambda trainer: 3, folder=tmp_path / "b")
    assert found.best_value == 3
    assert [*found.best_params] == ["lr"]
    evaluated = list[float]()

    def train_and_evaluate(trainer: Any) -> dict[str, float]:
        trainer.run(1, batches())
        metrics = trainer.evaluate([each * 2 for each in batches()])
        evaluated.append(metrics["loss"])
        return metrics

    found = search(make, None, 2, run=train_and_evaluate, folder=tmp_path / "d")
    assert [each.value for each in found.trials] == evaluated, "the score is not that of training"

    def space(trial: Any) -> dict[str, Any]:
        assert isinstance(trial, optuna.Trial)
        return {"lr": trial.suggest_float("rate", 0.01, 0.1) * 2, "bias": False, "epochs": 2}

    found = search(make_trainer, space, 2, run=run, folder=tmp_path / "c")
    assert [*found.best_params] == ["rate", "lr", "bias", "epochs"]
    assert found.best_params["lr"] == 2 * found.best_params["rate"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "direction": ({"direction": "minimise"}, "direction='minimise'; did you mean 'minimize'"),
    "no trials": ({"n_trials": 0}, "n_trials"),
    "a list of two": ({"space": {"lr": (0.1,)}}, r"space\['lr'\] is \(0.1,\); write \(low, high\)"),
    "a value": ({"space": {"lr": 0.1}}, "a value that stays the same belongs into make_trainer"),
    "upside down": ({"space": {"lr": (1.0, 0.1)}}, "1.0 is not below 0.1"),
    "log of zero": ({"space": {"lr": (0.0, 0.1, "log")}}, "begins above 0"),
    "no choice": ({"space": {"lr": []}}, "empty list"),
    "a class": ({"space": {"net": [torch.nn.ReLU]}}, "look the name up in make_trainer"),
    "no space": ({"space": [1, 2]}, "it must be a dict of ranges and choices"),
    "pruner": ({"pruner": "median"}, "such as optuna.pruners.MedianPruner"),
    "sampler": ({"sampler": "tpe"}, "such as optuna.samplers.RandomSampler"),
    "pruned front": (
        {"direction": ["min", "min"], "pruner": optuna.pruners.MedianPruner()}, "in several directions prunes no trial"
    ),
    "run": ({"run": 5}, "run=5; it must be a function"),
    "time": ({"max_time": -1}, "max_time=-1; it must be seconds above 0"),
    "catch": ({"catch": "RuntimeError"}, "give exception classes"),
    "folder": ({"folder": 5}, "folder=5; it must be the path of a folder"),
    "monitor": ({"direction": "maximize"}, "write direction='minimize', or leave it out, or choose another"),
    "not a trainer": ({"make_trainer": lambda trial: None}, "make_trainer returned None; it must return a zae.Trainer"),
    "no score": ({"run": lambda trainer: None}, "the score of a trial is None; it must be a number"),
    "two scores": ({"run": lambda trainer: (1, 2)}, "it must be a number"),
    "several processes": (
        {"make_trainer": lambda trial: Line.add_on(MultiGPUAddon)(torch.nn.Linear(4, 1), ["cpu", "cpu"],
                                                                  optimizer=torch.optim.SGD)},
        "trains each trial in one process",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_searched(name, tmp_path):
    """It is refused, and the right call after it is not in its way."""
    changed, said = WRONG[name]
    given = {
        "make_trainer": make_trainer,
        "space": SPACE,
        "n_trials": 1,
        "run": run,
        "folder": tmp_path / "s",
        **changed,
    }
    with pytest.raises(ConfigError, match=said):
        search(**given)
    assert search(make_trainer, SPACE, 1, run=run, folder=tmp_path / "s").trials[0].state == "complete"


def test_a_name_that_is_not_in_the_space(tmp_path, caplog):
    """It is refused with the nearest one; one that nobody reads makes no difference, and is warned of."""
    with pytest.raises(KeyError, match="no parameter 'lr' in the space; did you mean 'lrs'"):
        search(make_trainer, {"lrs": (0.1, 0.2), "bias": [True], "epochs": [2]}, 1, run=run, folder=tmp_path / "a")
    with pytest.raises(AttributeError, match=r"parameters are entries: trial\['lr'\]"):
        search(lambda trial: trial.lr, SPACE, 1, run=run, folder=tmp_path / "b")
    search(make_trainer, {**SPACE, "wd": (0.1, 0.2)}, 2, run=run, folder=tmp_path / "c")
    assert caplog.text.count("neither make_trainer nor run has read 'wd' of the space") == 1


@pytest.mark.parametrize("space", [None, SPACE], ids=["suggested", "of the space"])
def test_a_parameter_that_is_asked_of_optuna_is_read(space, tmp_path, caplog):
    def ask(trial):
        rate = trial.suggest_float("lr", *SPACE["lr"][:2], log=True)
        return make_trainer({"lr": rate, "bias": trial.suggest_categorical("bias", SPACE["bias"])})

    def run_two(trainer, trial):
        trainer.run(trial.suggest_int("epochs", *SPACE["epochs"]), batches(), batches())

    search(ask, space, 1, run=run_two, folder=tmp_path)
    assert "has read" not in caplog.text


def test_a_folder_with_another_search(tmp_path):
    search(make_trainer, SPACE, 1, run=run, folder=tmp_path, seed=0)
    for changed, said in (
        ({"space": {**SPACE, "lr": (0.1, 0.2)}}, "it began with space="),
        ({"seed": 1}, "it began with seed=0, and this one has seed=1"),
        ({"direction": "max"}, "it began with directions="),
    ):
        with pytest.raises(ConfigError, match=said):
            search(
                **{
                    "make_trainer": make_trainer,
                    "space": SPACE,
                    "n_trials": 2,
                    "run": run,
                    "folder": tmp_path,
                    **changed,
                }
            )
    (tmp_path / "search.journal").unlink()
    with pytest.raises(ConfigError, match=r"has trials, and the record of its search, search.journal, is missing"):
        search(make_trainer, SPACE, 1, run=run, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"has no search: search.journal is missing"):
        read(tmp_path)

    def train(trainer: Any) -> Any:
        with pytest.raises(ConfigError, match=r"folder=.* is in use: process .*; give another folder"):
            search(make_trainer, SPACE, 1, run=run, folder=tmp_path / "b")
        return 1.0

    search(make_trainer, SPACE, 1, run=train, folder=tmp_path / "b")


def test_a_model_that_is_used_again_is_warned_of(tmp_path, caplog):
    """Its weights go on from those of the trial before; frozen parts may be shared."""
    shared = torch.nn.Linear(4, 1)

    def make(trial: Any) -> Any:
        return Line(shared, "cpu", optimizer=torch.optim.SGD(shared.parameters(), lr=0.1), log_bar=False)

    search(make, {"lr": [0.1]}, 2, run=lambda trainer: 1, folder=tmp_path / "a")
    assert "make_trainer returned for trial 1 parameters that trial 0 has trained" in caplog.text
    caplog.clear()
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def mixed(trial: Any) -> Any:
        model = torch.nn.Sequential(frozen, torch.nn.Linear(4, 1))
        return Line(model, "cpu", optimizer=torch.optim.SGD(model[1].parameters(), lr=trial["lr"]), log_bar=False)

    search(mixed, {"lr": [0.1]}, 3, run=lambda trainer: 1, folder=tmp_path / "b")
    assert caplog.text == ""


def test_without_optuna(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(AddOnRequirement, match=r"a search needs the package optuna, .*: pip install optuna"):
        search(make_trainer, SPACE, 1, run=run, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_time_ends_a_search(tmp_path):
    """No further trial begins; the next call goes on."""
    found = search(make_trainer, SPACE, 50, run=run, folder=tmp_path, max_time=1e-9)
    assert len(found.trials) == 0
    assert str(found) == "no trial has begun"
    assert len(search(make_trainer, SPACE, 1, run=run, folder=tmp_path).trials) == 1


class Graded(Line):
    """Its best is the largest."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"grade": -super().test_step(batch)["loss"]}


def make_graded(trial: Any) -> Any:
    optimizer = torch.optim.SGD
    return Graded(torch.nn.Linear(4, 1), "cpu", optimizer=optimizer, monitor="grade", monitor_mode="max", log_bar=False)


def test_the_score_that_run_returns_has_the_direction_of_the_trainer(tmp_path):
    """As the error says; a trainer whose monitor is better where it is smaller looks for the smallest score."""

    def returns(trainer, trial):
        return float(trial.number)

    with pytest.raises(ConfigError, match="for one that run returns, give the trainer monitor_mode='max'"):
        search(make_trainer, SPACE, 2, "maximize", run=returns, folder=tmp_path / "a")
    found = search(make_graded, {"epochs": (1, 3)}, 2, "maximize", run=returns, folder=tmp_path / "a", seed=0)
    assert (found.best_value, found.best_trial.number) == (1.0, 1)


def test_the_direction_is_that_of_the_monitor(tmp_path):
    """Of the first trainer; the trials are those of a search that was given it, also when it is called again."""
    space = {"epochs": (1, 3)}
    found = search(make_graded, space, 2, run=run, folder=tmp_path / "a", seed=0)
    found = search(make_graded, space, 4, run=run, folder=tmp_path / "a", seed=0, catch=Exception)
    told = search(make_graded, space, 4, "maximize", run=run, folder=tmp_path / "b", seed=0)
    assert found.directions == told.directions == ["maximize"]
    assert look(found) == look(told)
    assert [each.number for each in found.trials] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="it began with directions="):
        search(make_graded, space, 5, "minimize", run=run, folder=tmp_path / "a", seed=0)
    caught = search(make_graded, space, 1, run=run, folder=tmp_path / "c", catch=Exception)
    assert (caught.directions, caught.trials[0].state) == (["maximize"], "complete")
