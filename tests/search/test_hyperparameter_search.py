"""hyperparameter_search as Transformers has it: its defaults, its snippet, and what it returns."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import transformers

from kit import hf
from kit.searches import batches, make_trainer
from zae import ConfigError, OptionError, Trainer
from zae.addons import HuggingFaceAddon, JSONLLoggerAddon, StateManagerAddon
from zae.search import BestRun, default_compute_objective, default_hp_space, hyperparameter_search


def model_init() -> Any:
    return hf.make_model("sequence")


def test_the_snippet(tmp_path, monkeypatch):
    """Of the documentation of Transformers, with a tiny model and the arguments as options."""
    monkeypatch.chdir(tmp_path)
    training_args = {"eval_strategy": "epoch", "seed": 3}
    train_dataset = eval_dataset = hf.dataset("sequence", 16)

    trainer = Trainer.add_on(HuggingFaceAddon)(
        model_init=model_init,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        device="cpu",
        log_bar=False,
        compute_metrics=confidence,
        **training_args,
    )

    best_trial = trainer.hyperparameter_search(
        direction="maximize",
        backend="optuna",
        n_trials=3,
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 5e-5, log=True),
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [8, 16, 32]),
            "num_train_epochs": trial.suggest_int("num_train_epochs", 2, 5),
        },
    )
    assert isinstance(best_trial, BestRun)
    assert best_trial.hyperparameters.keys() == {"learning_rate", "per_device_train_batch_size", "num_train_epochs"}
    trials = best_trial.run_summary.trials
    assert best_trial.objective == max(each.value for each in trials) == trials[int(best_trial.run_id)].value
    for each in trials:
        assert len(each.intermediate_values) == each.params["num_train_epochs"]
        assert each.value == [*each.intermediate_values.values()][-1]
    assert trainer.progress_checker.step == 0


def test_each_trial_has_its_own_folder_and_options(tmp_path):
    """Checkpoints and logs go there; without a validation the dataset is evaluated at the end."""
    made = Trainer.add_on(HuggingFaceAddon, StateManagerAddon, JSONLLoggerAddon)
    options = {"save_path": tmp_path / "checkpoints", "jsonl_path": tmp_path / "log.jsonl", "resume": "auto"}
    options |= {"model_init": lambda trial: hf.make_model("sequence", 0 if trial is None else trial.params["seed"])}
    options |= {"train_dataset": hf.dataset("sequence", 8), "eval_dataset": hf.dataset("sequence", 8)}
    trainer = made(device="cpu", log_bar=False, learning_rate=1e-3, **options)
    best = trainer.hyperparameter_search(
        lambda trial: {"seed": trial.suggest_int("seed", 1, 40), "num_train_epochs": 1},
        lambda metrics: metrics["eval_loss"], 2, hp_name=lambda trial: f"seed-{trial.params['seed']}",
        folder=tmp_path / "s",
    )  # fmt: skip
    for each in best.run_summary.trials:
        folder = tmp_path / "s" / f"seed-{each.params['seed']}"
        assert (folder / "log.jsonl").exists()
        assert (folder / "checkpoints" / "step-00000001").exists()
    assert not (tmp_path / "log.jsonl").exists()
    trainer.hyperparameter_search(default_hp_space, n_trials=1, timeout=60, gc_after_trial=True)
    assert (tmp_path / "checkpoints" / "search-1" / "run-0").is_dir()


def test_the_defaults_are_those_of_transformers():
    asked = list[Any]()

    class Asks:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: asked.append((name, args, kwargs)) or len(asked)

    theirs = transformers.trainer_utils.default_hp_space_optuna(Asks())
    calls, asked = asked, []
    assert default_hp_space(Asks()) == theirs
    assert calls == asked
    for metrics in ({"eval_loss": 1.5, "epoch": 2}, {"eval_loss": 1.5, "eval_accuracy": 0.5, "eval_f1": 0.25},
                    {"eval_loss": 2.0, "eval_runtime": 3.0, "eval_steps_per_second": 4.0}):  # fmt: skip
        assert default_compute_objective(metrics) == transformers.trainer_utils.default_compute_objective(metrics)
    assert BestRun._fields == transformers.trainer_utils.BestRun._fields


def confidence(prediction: Any) -> dict[str, float]:
    """A metric of compute_metrics; "epoch" is one of the user's own, which Transformers adds up as ``eval_epoch``."""
    return {"confidence": float(prediction.predictions.max()), "epoch": 0.25}


def rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def rate_and_epochs(trial: Any) -> dict[str, Any]:
    return {**rate(trial), "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 4)}


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("space", "direction", "options"),
    [
        (rate, "minimize", {}),
        (rate_and_epochs, "maximize", {"compute_metrics": confidence}),
        (rate_and_epochs, "minimize", {"eval_strategy": "epoch"}),
        (rate, "maximize", {"eval_strategy": "steps", "eval_steps": 3, "compute_metrics": confidence}),
        (rate, "minimize", {"sets": ("near", "far"), "compute_metrics": confidence}),
        (rate_and_epochs, "maximize", {"sets": ("near", "far"), "eval_strategy": "epoch"}),
    ],
)
def test_the_scores_are_those_of_transformers(tmp_path, monkeypatch, space, direction, options):
    """With the same draws: the score of each trial, the best one, and the names that ``compute_objective`` gets."""
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    given = dict(options)
    data, others = hf.dataset("sequence", 16), hf.dataset("sequence", 22)
    sets = dict(zip(given.pop("sets", ()), (data, others)))
    metrics = {"compute_metrics": given.pop("compute_metrics", None)}
    common = {"seed": 0, "num_train_epochs": 2.0, "per_device_train_batch_size": 8, **given}
    names = dict[str, set[str]]()

    def best_of(trainer: Any, whose: str, **more: Any) -> Any:
        scores = list[float]()

        def objective(found: dict[str, float]) -> float:
            names[whose] = {name for name in found if not name.endswith(("_runtime", "_per_second"))}
            scores.append(transformers.trainer_utils.default_compute_objective(found))
            return scores[-1]

        search = partial(trainer.hyperparameter_search, space, n_trials=3, direction=direction, **more)
        found = search(sampler=optuna.samplers.RandomSampler(seed=0))
        again = search(objective, sampler=optuna.samplers.RandomSampler(seed=0))
        assert again.objective == found.objective, "the default objective is that of Transformers"
        assert again.objective in scores
        return found

    arguments = hf.arguments(tmp_path / "theirs", **common)
    theirs = transformers.Trainer(
        args=arguments, model_init=model_init, train_dataset=data, eval_dataset=sets or data, **metrics
    )
    ours = Trainer.add_on(HuggingFaceAddon)(
        model_init=model_init, device="cpu", log_bar=False, train_dataset=data, eval_dataset=sets or data,
        **metrics, **common,
    )  # fmt: skip
    expected = best_of(theirs, "theirs", backend="optuna")
    found = best_of(ours, "ours")
    assert found.run_id == expected.run_id
    assert found.objective == pytest.approx(expected.objective, rel=1e-5)
    assert found.hyperparameters == pytest.approx(expected.hyperparameters)
    assert names["ours"] == names["theirs"]


@pytest.mark.exhaustive
def test_a_trial_that_is_behind_is_pruned_as_by_transformers(tmp_path, monkeypatch):
    """By optuna's default, MedianPruner, from the sixth trial on: at the same evaluation, with the same score."""
    monkeypatch.chdir(tmp_path)
    data = hf.dataset("sequence", 16)
    common = {"num_train_epochs": 3.0, "per_device_train_batch_size": 8, "eval_strategy": "epoch", "seed": 0}
    rates = iter([0.01, 0.01, 0.01, 0.01, 0.01, 1e-9] * 2)
    reports = dict[str, list[Any]]()

    def space(trial: Any) -> dict[str, Any]:
        rate = next(rates)
        return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}

    theirs = transformers.Trainer(
        args=hf.arguments(tmp_path / "theirs", **common), model_init=model_init, train_dataset=data, eval_dataset=data
    )
    study = optuna.create_study(storage="sqlite:///theirs.db", study_name="theirs")
    theirs.hyperparameter_search(
        space, n_trials=6, backend="optuna", storage="sqlite:///theirs.db", study_name="theirs", load_if_exists=True
    )
    reports["theirs"] = study.trials
    ours = Trainer.add_on(HuggingFaceAddon)(
        model_init=model_init, device="cpu", log_bar=False, train_dataset=data, eval_dataset=data, **common
    )
    reports["ours"] = ours.hyperparameter_search(space, n_trials=6).run_summary.trials
    for expected, trial in zip(reports["theirs"], reports["ours"], strict=True):
        assert trial.state == expected.state
        values = [*expected.intermediate_values.values()]
        assert [*trial.intermediate_values.values()] == pytest.approx(values, rel=1e-5)
        assert trial.value == pytest.approx(expected.value, rel=1e-5)
    assert reports["ours"][-1].state.name == "PRUNED"


def test_several_directions_give_a_front(tmp_path):
    def make(trial: Any, params: dict[str, Any], folder: Path) -> Trainer:
        return make_trainer(params["lr"])

    runs = hyperparameter_search(
        make, lambda trainer: trainer.run(1, batches(), batches()), tmp_path,
        lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.1)},
        lambda metrics: (metrics["eval_loss"], metrics["eval_accuracy"]), 3, ["minimize", "maximize"], seed=0,
    )  # fmt: skip
    assert isinstance(runs, list)
    assert all(len(each.objective) == 2 for each in runs)


def test_what_is_refused(tmp_path):
    arguments = (lambda trial, params, folder: make_trainer(0.1), lambda trainer: None, tmp_path)
    with pytest.raises(ConfigError, match="backend='ray'; zae searches with optuna alone"):
        hyperparameter_search(*arguments, backend="ray")
    for name in ("storage", "n_jobs", "pruners"):
        with pytest.raises(
            ConfigError, match=rf"does not take {name!r}: the study is in its folder, .*; it takes sampler"
        ):
            hyperparameter_search(*arguments, **{name: 2})
    data = {"train_dataset": hf.dataset("sequence", 8), "device": "cpu"}
    with pytest.raises(ConfigError, match=r"give model_init=\.\.\., a function, in the place of the model"):
        Trainer.add_on(HuggingFaceAddon)(model_init(), **data).hyperparameter_search()
    with pytest.raises(OptionError, match="learning_rates"):
        Trainer.add_on(HuggingFaceAddon)(model_init=model_init, **data).hyperparameter_search(
            lambda trial: {"learning_rates": trial.suggest_float("learning_rates", 0.1, 0.2)}, folder=tmp_path / "a"
        )
    with pytest.raises(AttributeError, match=r"HuggingFaceAddon.*zae\.search\.search"):
        make_trainer(0.1).hyperparameter_search()
