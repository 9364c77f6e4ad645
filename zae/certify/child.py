"""In the process of a script that trains with zae: do a job with its trainer, in place of the run that it begins."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zae import script
from zae.addon import AddOnBase
from zae.certify import loop, recipe
from zae.certify.compare import as_plain
from zae.common.fingerprint import fingerprint
from zae.common.random_state import seed_everything
from zae.common.walk import map_tensors
from zae.compose.composition import load_installed
from zae.compose.introspect import add_ons_of, is_engine_slot
from zae.data.loaders import copy_with, length_of
from zae.errors import ZaeError
from zae.loop.addon_state import GENERATORS
from zae.loop.step_output import StepOutput, loss_numbers
from zae.optim import parameters_of

__all__ = ["ANSWER", "Job", "install"]

ANSWER = "answer.pt"
"""The file that a job leaves in the folder of its plan."""
_VALID = 4  # Batches of a validation of a shortened run.
_notes: dict[str, Any] = {}
_installed = contextlib.ExitStack()  # Until the process ends.


@dataclass(frozen=True)
class Job:
    """One run of the script's trainer, and how it differs from that of the script."""

    kind: str = "train"
    """Whether to train, or to make the loop by hand ("plain")."""
    leave_out: Sequence[str] = ("parallel",)
    """The layers, or names, of add-ons that the trainer lacks."""
    add: Sequence[str] = ()
    """Names of add-ons of ``zae.addons`` that it has as well."""
    steps: int = 24
    """The most optimizer steps."""
    is_shortened: bool = True
    """Whether an epoch takes at most a third of the steps, so that what follows an epoch is part of the run."""
    precision: str = "fp32"
    """What "plain" computes in: as the trainer has chosen it in a run."""
    is_exact: bool = False
    """Whether the run is in float64, without what each rank draws or normalizes for its own samples."""
    batches: int = 1
    """How many batches of the loader are one."""


def install(plan: Mapping[str, Any]) -> None:
    """Let the script make its trainers as the job wants them; the first one that trains does the job instead."""
    job = Job(**plan["job"])
    seed_everything(0)  # Also what the script does not seed: all jobs are to draw the same.
    if job.is_exact:
        torch.set_num_threads(1)

    def make(original: Any, cls: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        made = _variant(cls, job, has_witness=job.kind == "train")
        trainer = original(made, *args, **_options(cls, made, given, job))
        if trainer.mode != "test":
            vars(trainer)["run"] = functools.partial(_work, trainer, cls, job, Path(plan["folder"], ANSWER))
        return trainer

    _installed.enter_context(script.making(make))


def _work(trainer: Any, cls: Any, job: Job, path: Path, *args: Any, **kwargs: Any) -> None:
    """Do the job, write its answer, and end the process: what the script does after its run is not asked for."""
    del vars(trainer)["run"]
    bound = inspect.signature(trainer.run).bind(*args, **kwargs)
    _notes["class"] = cls
    try:
        arguments = _limit(dict(bound.arguments), trainer.step_window.batches, job)
        answer = (_train if job.kind == "train" else _plain)(trainer, arguments, job)
    except ZaeError as error:
        answer = {"failed": str(error)}
    except Exception as error:
        answer = {"failed": script.explain_failure(error)}
    if int(os.environ.get("RANK") or 0) == 0 or "failed" in answer:
        torch.save(answer, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ----------------------------------------------------------------------------------------- the trainer of the script


def _variant(cls: Any, job: Job, has_witness: bool) -> Any:
    """Return a trainer class without the add-ons that the job leaves out, and with those that it adds."""
    gone = [each for each in add_ons_of(cls) if each.layer in job.leave_out or each.__name__ in job.leave_out]
    added = [load_installed(name) for name in job.add]
    held = {each.slot: each for each in add_ons_of(cls) if each.slot and each not in gone}
    has_engine = any(map(is_engine_slot, held))
    added = [each for each in added if each.slot not in held and not (has_engine and is_engine_slot(each.slot))]
    witness = [WitnessAddon] if has_witness else []
    return script.variant(cls, gone, [*added, *witness])


def _options(cls: Any, variant: Any, given: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the options of a variant of a class, on one device."""
    found = script.options_for(variant, cls, given)
    devices = found.get("device")
    if job.is_exact:
        found["device"] = "cpu"
    elif isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        found["device"] = devices[0]
    return {**found, "log_bar": False}


def _limit(arguments: dict[str, Any], window: Any, job: Job) -> dict[str, Any]:
    """Return the arguments of a run of at most so many steps, and note whether its epochs are shorter."""
    found = {name: value for name, value in arguments.items() if name != "max_time"}
    found["max_steps"] = min(job.steps, found.get("max_steps") or job.steps)
    if job.batches > 1:
        found["loader"] = _merged(found["loader"], job.batches)
    epochs, window = found.get("n_epoch") or 3, window if isinstance(window, int) else 1
    batches = max(1, job.steps // min(epochs, 3)) * window
    if job.is_exact:  # Two ranks, and the process that has the batches of both: they divide no batch left over.
        batches += batches % 2
    size = batches // job.batches or 1
    given = {"limit_batches", "overfit_batches", "steps_per_epoch"} & {k for k, v in found.items() if v is not None}
    length = length_of(found["loader"])
    _notes["is_shortened"] = is_shorter = not given and (length is None or length > size)
    if is_shorter and job.is_shortened:
        found["limit_batches"] = (size, _VALID)
    return found


def _merged(loader: Any, count: int) -> Any:
    """Return a DataLoader whose batches are so many of a loader."""
    batches = loader.batch_sampler
    size = batches.batch_size * count
    merged = torch.utils.data.BatchSampler(batches.sampler, size, batches.drop_last)
    return copy_with(loader, batch_sampler=merged, batch_size=size)


# ------------------------------------------------------------------------------------------------------------ training


class WitnessAddon(AddOnBase):
    """Note what each step did, for a certificate."""

    layer = "observe"
    job = Job()

    def on_run_begin(self) -> None:
        """Note where the run begins."""
        super().on_run_begin()
        _notes["steps"], _notes["random"] = [], False

    def to_device(self, batch: Any) -> Any:
        """Return floating-point numbers in float64, where the job wants that."""
        batch = super().to_device(batch)
        return map_tensors(_double, batch) if self.job.is_exact else batch

    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Note whether a step draws random numbers."""
        before = torch.get_rng_state() if self.job.is_exact else None
        found = super().micro_step(batch, count)
        _notes["random"] |= before is not None and not torch.equal(before, torch.get_rng_state())
        return found

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Note the loss, the weights and the random streams after a step."""
        super().on_step_end(outputs)
        weights = fingerprint(self.optimization.parameters) if self.world_size == 1 else ""
        row: dict[str, Any] = {"weights": weights}
        row |= {"step": self.progress_checker.step, "skipped": self.progress_checker.skipped_steps}
        row |= {"loss": repr([loss_numbers(each.loss) for each in outputs]), "random streams": _streams()}
        _notes["steps"].append(row)

    def on_run_end(self) -> None:
        """Note all that the run has left."""
        state, progress = self.state_dict(), self.progress_checker
        _notes["random"] |= GENERATORS in state  # An add-on draws for the samples of its rank.
        layers = {each.__name__: each.layer for each in add_ons_of(type(self))}
        keep = {name for name, layer in layers.items() if layer not in ("observe", "state", "parallel")}
        parts = {name: state.get(name) for name in ("model", "optimizer", "scheduler")}
        parts |= {f"the state of {name}": state[name] for name in keep & state.keys()}
        parts["training history"] = [dict(row) for row in self.train_history]
        parts["validation history"] = [dict(row) for row in self.valid_history]
        parts["progress"] = {name: getattr(progress, name) for name in ("step", "epoch", "batch", "skipped_steps")}
        parts["random streams"] = _streams()
        _notes["parts"] = {name: as_plain(value) for name, value in parts.items()}
        _notes["dp_world_size"] = self.engine.dp_world_size
        super().on_run_end()


def _train(trainer: Any, arguments: dict[str, Any], job: Job) -> dict[str, Any]:
    """Train, and return the notes."""
    WitnessAddon.job = job
    with _counting_updates():
        if job.is_exact:
            _make_exact(trainer.unwrap())
        trainer.run(**arguments)
    found = _describe(trainer.unwrap(), trainer.device, arguments)  # It asks the dataset, which may draw.
    weights = as_plain(dict(trainer.unwrap().state_dict())) if trainer.world_size == 1 else {}
    found["precision"] = trainer.precision_part.name
    notes = {key: value for key, value in _notes.items() if key != "class"}
    answer: dict[str, Any] = as_plain({**found, **notes, "weights": weights})
    return answer


def _describe(model: nn.Module, device: torch.device, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the certificate says of the script's trainer."""
    loader, add_ons = arguments["loader"], add_ons_of(_notes["class"])
    sampler = getattr(loader, "batch_sampler", None)
    return {
        "name": _notes["class"].__name__,
        "add_ons": {each.__name__: each.layer for each in add_ons},
        "parameters": sum(each.numel() for each in model.parameters()),
        "device": str(device),
        "can_merge": isinstance(loader, torch.utils.data.DataLoader) and type(sampler) is torch.utils.data.BatchSampler,
        **_draws_of(loader),
        "validates": arguments.get("valid_loader") is not None,
        "engine": any(is_engine_slot(each.slot) for each in add_ons),
    }


def _draws_of(loader: Any) -> dict[str, bool]:
    """Return whether a dataset gives another sample at each call, and whether a generator of its own is why."""
    from zae.common.random_state import isolated
    from zae.testing.watch import difference

    found = {"varies": False, "has_own_stream": False}
    with contextlib.suppress(Exception):
        with isolated():
            first, second = ([loader.dataset[0]] for _ in range(2))
        with isolated():
            third = [loader.dataset[0]]
        found["varies"] = difference(as_plain(first), as_plain(second)) is not None
        found["has_own_stream"] = difference(as_plain(first), as_plain(third)) is not None
    return found


def _make_exact(model: nn.Module) -> None:
    """Compute in float64, draw no dropout, and normalize by running statistics."""
    changed = set[str]()
    for module in model.double().modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
            module.eval()
            changed.add("BatchNorm frozen")
    _notes["changed"] = [*changed, *(["dropout off"] if _drop_nothing(model) else [])]


def _drop_nothing(model: nn.Module) -> bool:
    """Set the rate of each dropout to 0; return whether there was one."""
    found = False
    for module in model.modules():
        for name in ("p", "dropout"):  # The second is that of attention and of recurrent layers.
            rate = getattr(module, name, None)
            if isinstance(rate, float) and rate and (name != "p" or "dropout" in type(module).__name__.lower()):
                setattr(module, name, 0.0)
                found = True
    return found


@contextlib.contextmanager
def _counting_updates() -> Iterator[None]:
    """Note the weights after each step of an optimizer."""
    found = _notes["updates"] = list[str]()

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        found.append(fingerprint(parameters_of(optimizer)))

    handle = register_optimizer_step_post_hook(note)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------------- the loop by hand


def _plain(trainer: Any, arguments: dict[str, Any], job: Job) -> dict[str, Any]:
    """Train by the loop in plain PyTorch; return its weights, or what that loop does not do."""
    if without := recipe.uncovered_add_ons(trainer):
        return {"without": without}
    if missing := recipe.uncovered(trainer, arguments):
        return {"uncovered": missing}
    with _counting_updates():
        try:
            given, more = recipe.make_loop(trainer, arguments, job.precision)
            loop.train(*given, **more)
        except loop.Uncovered as found:
            return {"uncovered": [str(found)]}
    weights = dict(trainer.unwrap().state_dict())
    answer: dict[str, Any] = as_plain({"weights": weights, "updates": _notes["updates"]})
    return answer


# -------------------------------------------------------------------------------------------------------------- values


def _streams() -> str:
    """Return a hash of every random stream of the process."""
    from zae.testing.watch import streams

    return hashlib.sha256(repr(sorted(streams().items())).encode()).hexdigest()[:16]


def _double(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float64."""
    return tensor.double() if tensor.is_floating_point() else tensor
