"""Train the trials of a search, one after the other, and record how each ends."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from zae.addon import AddOnBase
from zae.common import random_state
from zae.common.device import release_memory
from zae.compose.composition import compose
from zae.compose.introspect import is_engine_slot, slots_of
from zae.compose.options import options_of
from zae.errors import ConfigError, NonFiniteError, kind_of, printable
from zae.search.result import SearchResult, read_study
from zae.search.scores import OtherDirectionError, Score
from zae.search.space import suggest
from zae.search.study import NAME, load_optuna, open_study, seed_of
from zae.search.trial import Trial
from zae.trainer import Trainer

__all__ = ["Search", "TrialAddon"]

_log = logging.getLogger("zae")

_ABOUT = "trial.json"
_OF_PARAMETERS = (NonFiniteError, torch.OutOfMemoryError)
"""Errors that the parameters of a trial cause; another one in the first trial is a fault of the script."""


class TrialAddon(AddOnBase):
    """Report each validation to the search, and stop where it prunes the trial; `search` adds it to each trainer."""

    layer = "control"
    process_attributes = {"search_trial": None, "search_score": None}
    search_trial: Trial | None = None
    search_score: Score | None = None

    def on_run_begin(self) -> None:
        """End at once what is begun after the trial was pruned."""
        super().on_run_begin()
        self._stop_if_pruned()

    def check_better(self, metrics: Mapping[str, float]) -> bool:
        """Report the metrics, after they are compared with the best."""
        better = super().check_better(metrics)
        if self.search_trial is not None and self.search_score is not None:
            score = self.search_score.of_metrics(metrics, self.score_of)
            self.search_trial.report(score, self.progress_checker.step)
            self._stop_if_pruned()
        return better

    def _stop_if_pruned(self) -> None:
        if self.search_trial is not None and self.search_trial.is_pruned:
            self.stop(f"trial {self.search_trial.number} is pruned")


@dataclass
class Search:
    """A search: how a trial is made, and where it is recorded."""

    make_trainer: Callable[[Trial], Any]
    run: Callable[..., Any]
    space: Any
    folder: Path
    settings: dict[str, Any]
    objective: Callable[[Any], Any] | None = None
    sampler: Any = None
    pruner: Any = None
    catch: tuple[type[BaseException], ...] | None = None
    name: Callable[[Trial], str] | None = None
    trained: dict[int, Any] = field(default_factory=dict)  # Parameters of models of earlier trials, by id.
    takes_direction: bool = False  # Of the monitor of the first trainer.
    is_open: bool = False

    def open(self) -> None:
        """Open the study."""
        self.optuna = load_optuna()
        pruner = self.pruner or self.optuna.pruners.NopPruner()
        self.study, self.storage, self.settings = open_study(self.folder, self.settings, self.sampler, pruner)
        self.is_open = True

    def result(self) -> SearchResult:
        """Return the trials so far."""
        return read_study(self.study, self.folder)

    @property
    def directions(self) -> list[str]:
        found: list[str] = self.settings["directions"]
        return found

    def frozen(self) -> list[Any]:
        """Return all trials, as optuna records them."""
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return found

    def interrupted(self) -> list[int]:
        """Return the numbers of the trials that began and did not end."""
        return [each.number for each in self.frozen() if not each.state.is_finished()]

    def ask(self, number: int | None = None) -> Any:
        """Begin a new trial of optuna, or continue an interrupted one."""
        if number is None:
            return self.study.ask()
        study_id = self.storage.get_study_id_from_name(self.study.study_name)
        identifier = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return self.optuna.trial.Trial(self.study, identifier)

    # -------------------------------------------------------------------------------------------------- one trial

    def conduct(self, asked: Any) -> None:
        """Train one trial and record how it ended; an error that ends the search is raised.

        A trial that an error or a signal interrupts stays open, and the next call of `search` continues it.
        """
        began = time.perf_counter()
        known = self.frozen()[asked.number]
        with random_state.isolated():
            random_state.seed_everything(seed_of(self.settings["seed"], asked.number))
            trial = self._begin(asked)
            try:
                values = self._train(trial)
                why = ""
            except OtherDirectionError:  # The search begins again, with that direction.
                raise
            except BaseException as error:
                if not self._is_caught(error):
                    error.add_note(f"zae: trial {trial.number} of the search in {self.folder} had {trial}")
                    raise
                values = None
                why = printable(f"{type(error).__name__}: {error}", kept="")
        release_memory()  # Trainers are part of reference cycles.
        if values is not None and any(math.isnan(each) for each in values):
            values = None
            why = "the score is NaN"
        states = self.optuna.trial.TrialState
        state = states.FAIL if why else states.PRUNED if trial.is_pruned else states.COMPLETE
        asked.set_user_attr("seconds", known.user_attrs.get("seconds", 0.0) + time.perf_counter() - began)
        if why:
            asked.set_user_attr("error", why)
        self.study.tell(asked.number, values if state is states.COMPLETE else None, state=state)
        self._describe(trial, state.name.lower(), values, why)

    def warn_of_failure(self, number: int) -> None:
        """Warn of a trial that has failed."""
        found = self.frozen()[number]
        if "error" in found.user_attrs:
            why = found.user_attrs["error"]
            params = found.user_attrs.get("params", {})
            text = f"trial {number} of the search failed: {why}; its parameters: {params}; the others continue"
            _log.warning(printable(text, kept=""))

    def _begin(self, asked: Any) -> Trial:
        """Draw the parameters, and make the folder."""
        try:
            given = suggest(self.space, asked)
        except ValueError as error:
            raise (
                error if isinstance(error, ConfigError) else ConfigError(f"the space cannot be used: {error}")
            ) from error
        seed = seed_of(self.settings["seed"], asked.number, "trainer")
        trial = Trial(asked, given, asked.number, self.folder, seed)
        trial.folder = self.folder / (f"trial-{asked.number:04}" if self.name is None else self.name(trial))
        trial.is_continued = (trial.folder / _ABOUT).exists()
        trial.folder.mkdir(parents=True, exist_ok=True)
        asked.set_user_attr("folder", trial.folder.name)
        asked.set_user_attr("params", {key: _plain(value) for key, value in trial.items()})
        self._describe(trial, "running")
        trial.read.clear()
        trial.is_pruned = len(self.directions) == 1 and asked.should_prune()  # It may have been interrupted after that.
        return trial

    def _train(self, trial: Trial) -> list[float] | None:
        """Make the trainer, let it train, and return the scores; None for a trial that is pruned."""
        trainer = _checked(self.make_trainer(trial))
        score = Score(self.objective, self.directions)
        if "overwrite" in options_of(type(trainer)) and trial.is_continued:
            cast(Any, trainer).overwrite = True  # Where it does not resume, what it had saved would be in its way.
        try:
            score.check_monitor(trainer.history)
        except OtherDirectionError:
            if len(self.frozen()) == 1:  # Nothing has been trained: the next search may have another direction.
                (self.folder / NAME).unlink()
                (trial.folder / _ABOUT).unlink()
                self.is_open = False
                if self.takes_direction:
                    raise
            raise score.contradiction(trainer.history) from None
        self._warn_of_shared_models(trainer.unwrap(), trial.number)
        if len(self.directions) == 1:
            trainer.__class__ = cast(type[Trainer], compose(type(trainer), [TrialAddon]))
            vars(trainer).update(search_trial=trial, search_score=score)
        result = self.run(*(trainer, trial)[: _count(self.run)])
        self._warn_of_unread(trial)
        trial.asked.set_user_attr("params", {key: _plain(value) for key, value in trial.items()})  # All that was drawn.
        return None if trial.is_pruned else score.of_run(result, trainer.history)

    def _is_caught(self, error: BaseException) -> bool:
        """Return whether an error fails the trial alone."""
        if self.catch is not None:
            return isinstance(error, self.catch)
        has_ended = self.is_open and any(each.state.name in ("COMPLETE", "PRUNED") for each in self.frozen())
        return isinstance(error, Exception if has_ended else _OF_PARAMETERS)

    def _warn_of_shared_models(self, model: nn.Module, at: int) -> None:
        """Warn where a trial would train on from the weights of an earlier one."""
        self.trained = {key: pair for key, pair in self.trained.items() if pair[0]() is not None}
        trained = [each for each in model.parameters() if each.requires_grad]
        before = next((self.trained[id(each)] for each in trained if id(each) in self.trained), None)
        if before is not None and before[1] != at:
            _log.warning(
                f"make_trainer returned for trial {at} parameters that trial {before[1]} has trained: the trials "
                "depend on each other. Make the model in make_trainer"
            )
        self.trained |= {id(each): (weakref.ref(each), at) for each in trained}

    def _warn_of_unread(self, trial: Trial) -> None:
        """Warn in the first trial of parameters that make no difference."""
        unread = [name for name in trial if name not in trial.read]
        if unread and trial.number == 0:
            _log.warning(
                f"neither make_trainer nor run has read {', '.join(map(repr, unread))} of the space: it changes "
                f"nothing. Read it as trial[{unread[0]!r}], or take it out of the space"
            )

    def _describe(self, trial: Trial, state: str, values: Sequence[float] | None = None, error: str = "") -> None:
        """Write what a trial is, and how it ended, into its folder."""
        content: dict[str, Any] = {"number": trial.number, "state": state, "params": dict(trial)}
        content |= {"values": values} if values is not None else {}
        content |= {"error": error} if error else {}
        path = trial.folder / _ABOUT
        path.with_suffix(".tmp").write_text(json.dumps(content, indent=1, default=repr) + "\n", encoding="utf-8")
        os.replace(path.with_suffix(".tmp"), path)


def _checked(made: Any) -> Trainer:
    """Return what ``make_trainer`` returned, if it is a trainer of one process."""
    if not isinstance(made, Trainer):
        raise ConfigError(f"make_trainer returned {kind_of(made)}; it must return a zae.Trainer")
    if made.world_size > 1 or any(map(is_engine_slot, slots_of(type(made)))):
        raise ConfigError(
            f"a search trains each trial in one process, and {type(made).__name__} is for several; return the "
            "trainer without its parallel add-on, and train with the best parameters on all processes"
        )
    return made


def _count(run: Callable[..., Any]) -> int:
    """Return whether ``run`` takes the trainer alone, 1, or the trial too, 2."""
    try:
        inspect.signature(run).bind(None, None)
    except TypeError:
        return 1
    except ValueError:  # It has no signature.
        return 2
    return 2


def _plain(value: Any) -> Any:
    """Return a parameter as JSON."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
