"""What a run is doing at this moment: error notes are made of it, and add-ons count the batches of a window by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from zae.errors import ConfigError

__all__ = ["Activity", "EvaluationSettings"]


class EvaluationSettings(NamedTuple):
    """The evaluation that a run makes.

    Attributes
    ----------
    is_running : bool
        Whether weights, modes and random streams are those of an evaluation.
    step : {"test_step", "predict_step"}
        The step that is made of each batch.
    loader_name : str or None
        The name of the loader that is read, where the loaders were given by name.
    seed : int or None
        Where the random streams begin; None is where those of training stand.
    """

    is_running: bool = False
    step: str = "test_step"
    loader_name: str | None = None
    seed: int | None = None


@dataclass(slots=True)
class Activity:
    """What a run is doing.

    Attributes
    ----------
    batch : object
        The batch of the step in progress.
    micro_index : int
        The index in its window of the batch whose gradient is computed.
    loader : object
        The loader of the open epoch, or of the evaluation.
    loader_use : {"epoch", "evaluation"}
        What the loader is read for.
    is_loading : bool
        Whether the loader is being asked for a batch.
    has_begun_epoch : bool
        Whether the present call of ``run_epoch`` has begun an epoch.
    has_read_batch : bool
        Whether the loop over the open epoch has got a batch.
    evaluation : EvaluationSettings
        The evaluation in progress.
    """

    batch: Any = None
    micro_index: int = 0
    loader: Any = None
    loader_use: str = "epoch"
    is_loading: bool = False
    has_begun_epoch: bool = False
    has_read_batch: bool = False
    evaluation: EvaluationSettings = EvaluationSettings()  # noqa: RUF009  (it is a tuple)

    @contextmanager
    def reading(self, loader: Any) -> Iterator[None]:
        """Note which loader an evaluation reads; an error leaves it noted."""
        before = (self.batch, self.loader, self.loader_use, self.is_loading)
        self.batch = None
        self.loader = loader
        self.loader_use = "evaluation"
        self.is_loading = True
        yield
        self.batch, self.loader, self.loader_use, self.is_loading = before

    def check_load(self) -> None:
        """Refuse to load a state within a step or an evaluation, which would go on with it."""
        if self.batch is not None or self.evaluation.is_running:
            within = "an evaluation" if self.evaluation.is_running else "a step"
            raise ConfigError(
                f"a state is loaded within {within}, which would go on with other weights than it began with; write "
                "continue_from(state), which loads it when the step is done"
            )
