"""Fits: schedule-free optimizers and the search of optuna."""

from __future__ import annotations

import copy

import torch
from torch.nn.functional import cross_entropy

from kit import hand
from zae import Trainer
from zae.addons import StateManagerAddon


class Classifier(Trainer):
    """A classifier of two classes."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    test_step = train_step


def test_schedulefree_resumes_in_mid_epoch(tmp_path):
    """The weights are those of the loop by hand, which calls `train` and `eval` itself, also after a resume."""
    from schedulefree import AdamWScheduleFree

    torch.manual_seed(0)
    expected = hand.network()
    optimizer = AdamWScheduleFree(expected.parameters(), lr=0.01)
    for _ in range(2):
        expected.train(), optimizer.train()
        for inputs, targets in hand.loader():
            optimizer.zero_grad()
            cross_entropy(expected(inputs), targets).backward()
            optimizer.step()
    optimizer.eval()
    # The first run stops within the first epoch, the second one resumes it.
    for limit in (4, None):
        torch.manual_seed(0 if limit else 99)
        # begin: schedulefree
        import schedulefree

        model, loader = hand.network(), hand.loader()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
        Task = Classifier.add_on(StateManagerAddon)  # noqa: N806
        trainer = Task(
            model,
            "cpu",
            optimizer=optimizer,
            save_path=tmp_path,
            save_every=1,
            resume="auto",
        )
        trainer.run(2, loader, max_steps=limit)
        # end
    optimizer.eval()
    assert trainer.progress_checker.step == 12
    assert hand.digest(model) == hand.digest(expected)


def test_optuna_prunes_from_a_hook():
    """An objective as in optuna's documentation; a hook reports each validation and raises `TrialPruned`."""
    # begin: optuna
    import optuna

    class Reported(Classifier):
        def on_validation_end(self, metrics):
            super().on_validation_end(metrics)
            self.trial.report(metrics["loss"], self.progress_checker.epoch)
            if self.trial.should_prune():
                raise optuna.TrialPruned

    def objective(trial):
        model = hand.network()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=trial.suggest_float("lr", 1e-6, 1.0, log=True)
        )
        trainer = Reported(model, "cpu", optimizer=optimizer)
        trainer.trial = trial
        return trainer.run(4, hand.loader(), hand.loader(seed=5))["best_valid"]["loss"]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=8)
    # end
    states = [trial.state.name for trial in study.trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert all(
        len(trial.intermediate_values) == 4
        for trial in study.trials
        if trial.state.name == "COMPLETE"
    )
    assert study.best_value == min(
        trial.value for trial in study.trials if trial.state.name == "COMPLETE"
    )
    assert copy.copy(study.best_params)["lr"] > 1e-3
