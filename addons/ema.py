"""An average of the weights, exponential or uniform, used for every evaluation of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from zae import random_state
from zae.addon import AddOnBase, Description
from zae.arguments import CountOrZero, Interval
from zae.checkpoint.encoding import name_of_place
from zae.checkpoint.group import Group
from zae.checkpoint.weights import save_weights
from zae.errors import CheckpointMismatch, ConfigError
from zae.model.weights import fit_name, has_lazy, is_half_weight, own_names, plain_names, plain_state
from zae.torch_private import alike, in_place
from zae.values.strides import has_own_elements
from zae.values.walk import is_sharded, local_part, redistribute_like

__all__ = ["EMAAddon"]

_DECAY = 0.999
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class EMAAddon(AddOnBase):
    """Average the weights, exponentially or uniformly, and evaluate with the average.

    After each optimizer step that took place, ``average = decay * average + (1 - decay) * weights`` (Polyak & Juditsky
    1992; the exponential form of Izmailov et al. 2018, section 3.1, and Tarvainen & Valpola 2017, eq. 1). The average
    of weights in bfloat16 or float16 is in float32. Buffers are copied. The saved model file contains the training
    weights; the average is saved beside them.

    ``averaging="uniform"`` is stochastic weight averaging (Izmailov et al. 2018, algorithm 1): the mean of the weights
    at the end of each epoch after ``average_start``. Call ``update_batch_norm`` after the run if the model has
    BatchNorm.

    Parameters
    ----------
    decay : float
        In [0, 1): the weight of the old average in each step; not for "uniform".
    averaging : {"exponential", "uniform"}
        Which average.
    average_start : int
        Epochs before the average begins; until then it is the weights themselves.

    Raises
    ------
    ConfigError
        An option is outside of its range.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import EMAAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model.weight * batch).sum()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> trainer = Task.add_on(EMAAddon)(model, "cpu", optimizer=optimizer, decay=0.5)
    >>> _ = trainer.run(1, [torch.ones(1, 1)] * 2)
    >>> model.weight.item(), trainer.average["weight"].item()
    (-2.0, -1.25)
    """

    layer = "control"
    traits = ("copies_weights",)
    state_attributes = ("average", "averaged_epochs")
    _averaged: list[tuple[Tensor, Tensor]]
    _copied: list[tuple[Tensor, Tensor]]
    _columns: tuple[list[Any], list[Any]]
    _places: list[tuple[str, Any, str | None]]
    _paired: int

    replicated_options = {
        "decay": "on_step_end",
        "averaging": "on_step_end",
        "average_start": "on_step_end",
    }

    def __init__(
        self,
        *args: Any,
        decay: Annotated[float, Interval("[0, 1)"), "a number in [0, 1), for instance 0.999"] = _DECAY,
        averaging: Literal["exponential", "uniform"] = "exponential",
        average_start: CountOrZero = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.averaging = averaging
        self.average_start = average_start
        self.averaged_epochs = 0  # Of a uniform average.
        if averaging == "uniform" and decay != _DECAY:
            raise ConfigError(
                f"decay={decay!r} is for averaging='exponential', and a uniform average does not use it; leave it out"
            )
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._averaged = []
        self._copied = []
        self._columns = [], []  # Both again, in groups that a kernel takes together.
        self._places = []  # Of each copied tensor: key, owner, name there.
        self._paired = 0  # The number of parameters when they were paired.

    def setup(self) -> None:
        """Start the average at the present weights, unless it is loaded; of a lazy model, at its first step."""
        super().setup()
        self._pair()

    def _pair(self) -> None:
        """Pair each tensor of the average with the one that it follows, so that a step needs no lookup."""
        module = self.unwrap()
        if has_lazy(module.parameters()) or has_lazy(module.buffers()):
            self._paired = -1
            return
        state = plain_state(module, keep_vars=True)
        live = {key: state[key] for key in self._names_to_average(state)}
        started = {id(weight): average for average, weight in (*self._averaged, *self._copied)}
        for key, value in live.items():
            if key not in self.average:  # All of them at first; later those that were added to the model.
                self.average[key] = started[id(value)] if id(value) in started else value.detach().clone()
            if is_half_weight(value):
                self.average[key] = self.average[key].float()
        trained = {id(parameter) for parameter in module.parameters()}
        pairs = {
            id(value): (redistribute_like(self.average[key].to(value.device), value), value)
            for key, value in live.items()
        }
        self.average = {key: pairs[id(value)][0] for key, value in live.items()}  # Tied weights share one average.
        self._averaged = [
            pair
            for key, pair in pairs.items()
            if key in trained and (pair[0].is_floating_point() or pair[0].is_complex())
        ]
        averaged = {id(pair[1]) for pair in self._averaged}
        self._copied = [pair for key, pair in pairs.items() if key not in averaged]
        places = _places_in(module)
        names = {id(value): key for key, value in live.items()}
        self._places = [
            (names[id(value)], *(places.get(id(value)) or _place_of_extra(module, names[id(value)], value)))
            for _, value in self._copied
        ]
        self._columns = [*alike(self._averaged)], [*alike(self._copied)]
        self._paired = len(vars(self).get("parameters", ()))  # A state may be loaded before setup.

    def optimizer_step(self) -> bool:
        """Update the average after a step that took place."""
        if len(self.parameters) != self._paired:
            self._pair()
        stepped = super().optimizer_step()
        if stepped:
            with torch.no_grad():
                if not self.averaged_epochs:  # Else it is updated at the end of the epoch.
                    is_begun = self.progress_checker.epoch >= self.average_start and self.averaging == "exponential"
                    self._update_average(self.decay if is_begun else None)
                self._follow()
                for averages, buffers in self._columns[1]:
                    in_place("copy_", averages, buffers)
        return stepped

    def _names_to_average(self, state: Mapping[str, Any]) -> list[str]:
        """Return the tensors that the average has: all, but those that are not saved, such as a frozen model's."""
        names = self.weights_to_save(state)
        return [
            key
            for key, value in state.items()
            if isinstance(value, Tensor)
            # Statistics of BatchNorm are saved once they have changed.
            and (key in names or not (isinstance(value, nn.Parameter) or _is_quantized(value)))
        ]

    def _update_average(self, decay: float | None) -> None:
        """Add the weights to the average; None replaces it by them."""
        for pairs in self._columns[0]:
            averages, weights = (list(map(local_part, pair)) for pair in pairs)
            if decay is None:
                in_place("copy_", averages, weights)
            else:
                in_place("mul_", averages, decay)
                in_place("add_", averages, weights, alpha=1 - decay)

    def scheduler_step(self, when: str) -> None:
        """Update a uniform average at the end of an epoch, before its validation."""
        if when == "epoch" and self.averaging == "uniform" and self.progress_checker.epoch >= self.average_start:
            epochs = self.averaged_epochs
            with torch.no_grad():
                self._update_average(epochs / (epochs + 1) if epochs else None)
            self.averaged_epochs += 1
        super().scheduler_step(when)

    def update_batch_norm(self, loader: Any) -> None:
        """Compute the BatchNorm statistics of the average over a loader (Izmailov et al. 2018, section 3.2).

        They are the means over the batches, as ``torch.optim.swa_utils.update_bn`` computes them, and are kept in
        ``average`` until the next optimizer step. The training weights and statistics, and random streams, stay.

        Parameters
        ----------
        loader : iterable
            The training batches, as ``test_step`` takes them.
        """
        with self.ready(), random_state.isolated(), self.averaged():
            norms = [
                module
                for module in self.unwrap().modules()
                if isinstance(module, _NORMS) and module.track_running_stats
            ]
            momenta = [norm.momentum for norm in norms]
            try:
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None
                    norm.train()
                for batch in loader:
                    with self.forward_context():
                        self.test_step(self.to_device(batch))
                for average, value in self._copied:
                    average.copy_(value)
            finally:
                for norm, momentum in zip(norms, momenta, strict=True):
                    norm.momentum = momentum
                    norm.eval()

    def _follow(self) -> None:
        """Follow buffers that the model has replaced, or resized."""
        is_changed = False
        for index, ((key, owner, name), (average, before)) in enumerate(zip(self._places, self._copied, strict=True)):
            value = owner.get_extra_state() if name is None else owner[name]
            if not isinstance(value, Tensor) or (value is before and value.shape == average.shape):
                continue
            if value.shape != average.shape:
                average = value.detach().clone()
                self.average[key] = average
            self._copied[index] = (average, value)
            is_changed = True
        if is_changed:
            self._columns = self._columns[0], [*alike(self._copied)]

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Evaluate with the average in the model, and restore the training weights."""
        with super().evaluation_context(), torch.no_grad():
            self._follow()
            # An expanded buffer cannot be written to, and has not changed since the average copied it.
            pairs = [pair for pair in (*self._averaged, *self._copied) if has_own_elements(pair[1])]
            weights = [weight.detach().clone() for _, weight in pairs]
            # Through `data`: a step may evaluate between its forward and its backward, which accepts the weights that
            # are restored here, and would refuse weights that were written to.
            try:
                for average, weight in pairs:
                    weight.data.copy_(average)
                yield
            finally:
                for before, (_, weight) in zip(weights, pairs, strict=True):
                    weight.data.copy_(before)

    def local_shards(self) -> dict[str, Tensor]:
        """Let an average lie on the ranks as its weight does."""
        shards = {key: tensor for key, tensor in self.unwrap().state_dict().items() if is_sharded(tensor)}
        own = {f"state/{name_of_place(('EMAAddon', 'average', key))}": shard for key, shard in shards.items()}
        return super().local_shards() | own

    def load_evaluation_state(self, state: Mapping[str, Any]) -> None:
        """Load the average that was evaluated, beside the weights."""
        super().load_evaluation_state(state)
        if "EMAAddon" in state:
            saved = _rename(state["EMAAddon"]["average"], self.unwrap())
            self.average = {name: value.clone() for name, value in saved.items()}
            self._pair()

    def save_average(self, path: str | Path) -> Path:
        """Save the averaged weights alone, under the keys of the model.

        Parameters
        ----------
        path : str or Path
            A file; its suffix is the format, as for ``save_model``.

        Returns
        -------
        Path
            The file.
        """
        if not self.engine.can_save_alone:
            self.engine.rendezvous("save_average")
        average = self.engine.full_tensors(self.average)
        written = {"step": str(self.progress_checker.step), "ema": "true"}
        save = partial(save_weights, Path(path), average, written, self.is_main or self.engine.can_save_alone)
        return (
            save()
            if self.engine.can_save_alone
            else Group(self.rank, self.gather).together(save, Path(path))[self.rank]
        )

    def describe(self) -> list[Description]:
        """Tell what a uniform average needs afterwards."""
        descriptions = super().describe()
        if self.averaging == "uniform" and any(isinstance(module, _NORMS) for module in self.unwrap().modules()):
            later = "trainer.update_batch_norm(loader) afterwards"
            descriptions.append(
                Description("the uniform average needs BatchNorm statistics", later, where="on_run_end")
            )
        return descriptions

    def adapt_state(self, entry: Any) -> Any:
        """Refuse an average of another model; replace names of wrappers, which older versions saved."""
        if entry is None:
            return None
        average: Any = entry.get("average") if isinstance(entry, Mapping) else None
        if misfit := _misfit(average, self.unwrap()):
            raise CheckpointMismatch(
                f"the state of EMAAddon contains no average of this model's weights: {misfit}; build the model as it "
                "was saved, or load the weights alone: apply_weights(path)"
            )
        epochs = entry.get("averaged_epochs", entry.get("averaged", 0))  # Older versions saved "averaged", or neither.
        return {"averaged_epochs": epochs, "average": _rename(average, self.unwrap())}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Pair the loaded average with the weights."""
        super().load_state_dict(state, strict)
        if self.average:
            self._pair()


def _rename(average: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return a fitting average under the present names."""
    known = own_names(module)
    return {fit_name(name, known): value.detach() for name, value in average.items()}


def _misfit(average: Any, module: nn.Module) -> str:
    """Return what does not fit of a saved average; empty where all does."""
    if not isinstance(average, Mapping):
        return f"it is {average!r:.40}"
    live = plain_state(module)
    trained = dict(module.named_parameters(remove_duplicate=False))
    plain = plain_names(module, trained)
    trained = {plain[name]: parameter for name, parameter in trained.items()}
    for name, value in average.items():
        key = fit_name(name, live)
        if key not in live:
            return f"{key} is not in {type(module).__name__}"
        if not isinstance(value, Tensor):
            return f"{key} is a {type(value).__name__}"
        # Buffers may have another shape: that of an observer is known after its first batch.
        if key in trained and not has_lazy([trained[key]]) and value.shape != trained[key].shape:
            return f"{key} is {tuple(value.shape)} and must be {tuple(trained[key].shape)}"
    return ""


def _is_quantized(value: Tensor) -> bool:
    return value.dim() > 0 and not (value.is_floating_point() or value.is_complex())


def _places_in(module: nn.Module) -> dict[int, tuple[Any, str]]:
    """Return the owner and the name of each parameter and buffer of a model, by id."""
    owners = [owner for submodule in module.modules() for owner in (submodule._parameters, submodule._buffers)]
    return {id(value): (owner, name) for owner in owners for name, value in owner.items() if value is not None}


def _place_of_extra(module: nn.Module, key: str, value: Tensor) -> tuple[Any, str | None]:
    """Return the owner of a tensor that is neither: a module with extra state, else a dict with the tensor itself."""
    path, _, name = own_names(module)[key].rpartition(".")
    return (module.get_submodule(path), None) if name == "_extra_state" else ({key: value}, key)
