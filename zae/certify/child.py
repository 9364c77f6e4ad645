"""The process of one run: make the trainer of the script as the job says, train, and write down what happened."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zae import script
from zae.addon import AddOnBase
from zae.certify import loop, recipe
from zae.certify.jobs import Job
from zae.common.fingerprint import fingerprint
from zae.common.walk import map_tensors
from zae.compose.composition import load_installed
from zae.compose.introspect import add_ons_of, is_engine_slot
from zae.compose.options import options_of
from zae.data.loaders import copy_with, length_of
from zae.errors import ConfigError, ZaeError
from zae.loop.addon_state import GENERATORS
from zae.loop.step_output import StepOutput, loss_numbers
from zae.optim import parameters_of

__all__ = ["work"]

_VALID = 4  # Batches of a validation of a shortened run.
_notes: dict[str, Any] = {}


def work(job: Job) -> None:
    """Do a job, and write the answer."""
    with contextlib.suppress(AttributeError, PermissionError):
        os.setsid()
    folder = Path(job.folder)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    _enter(job)
    try:
        answer = {"train": _train, "plain": _plain}[job.kind](job)
    except ZaeError as error:
        answer = {"failed": str(error)}
    except Exception as error:
        answer = {"failed": script.explain_failure(error)}
    torch.save(answer, folder / "answer.part")
    os.replace(folder / "answer.part", folder / "answer")


def _enter(job: Job) -> None:
    """Work in a new folder with links to what is in that of the command; seed, and join the other ranks."""
    from zae.common.random_state import seed_everything

    here = Path(job.folder, "work")
    if not here.exists():
        here.mkdir()
        for each in Path(job.origin).iterdir():
            (here / each.name).symlink_to(each)
    os.chdir(here)
    if job.world > 1:
        ranks = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world}
        os.environ.update({key: str(value) for key, value in ranks.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
        torch.set_num_threads(1)
    elif "WORLD_SIZE" in os.environ:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    seed_everything(0)


# ----------------------------------------------------------------------------------------- the trainer of the script


@contextlib.contextmanager
def _made(job: Job, has_witness: bool = True) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the script's trainer as the job wants it, and the arguments of its run."""
    classes: dict[int, Any] = {}

    def make(original: Any, cls: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        made = _variant(cls, job, has_witness)
        trainer = original(made, *args, **_options(cls, made, given, job))
        classes[id(trainer)] = cls
        return trainer

    with script.making(make), script.trainer_of(job.script, job.given) as found:
        trainer, arguments = found.trainer, script.require_arguments(found, job.script)
        if trainer.mode == "test":
            raise ConfigError("the trainer has mode='test': there is no training to certify")
        _notes["class"] = classes.get(id(trainer), type(trainer))
        yield trainer, _limit(arguments, trainer.step_window.batches, job)


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
    """Return the options of a variant of a class: what it writes lies in the folder of the job."""
    known, found = options_of(variant), script.options_for(variant, cls, given)
    found |= {name: value for name, value in job.options.items() if name in known}
    script.redirect(found, lambda option, file: Path(job.folder, "out", file))
    devices = found.get("device")
    if job.is_exact:
        found["device"] = "cpu"
    elif isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        found["device"] = devices[0]
    if "resume" in known:
        found["resume"] = "auto"
    if "save_path" in known:
        found.setdefault("save_path", str(Path(job.folder, "out", "checkpoints")))
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
        _notes["began"], _notes["steps"] = time.monotonic(), []
        _notes["random"] = False
        with open(Path(self.job.folder, "begun"), "a") as file:
            file.write(f"{self.progress_checker.step}\n")

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
        if self.job.seconds and time.monotonic() - _notes["began"] > self.job.seconds:
            self.stop("certify has no more time for this run")
        if self.job.pause:
            time.sleep(self.job.pause)

    def on_run_end(self) -> None:
        """Note all that the run has left."""
        _notes["seconds"] = time.monotonic() - _notes["began"]
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


def _train(job: Job) -> dict[str, Any]:
    """Train, and return the notes."""
    WitnessAddon.job = job
    with _made(job) as (trainer, arguments), _counting_updates():
        if job.is_exact:
            _make_exact(trainer.unwrap())
        trainer.run(**arguments)
        found = _describe(trainer.unwrap(), trainer.device, arguments)  # It asks the dataset, which may draw.
        weights = as_plain(dict(trainer.unwrap().state_dict())) if job.world == 1 else {}
        found["precision"] = trainer.precision_part.name
    answer: dict[str, Any] = as_plain(
        {**found, **{k: v for k, v in _notes.items() if k != "class"}, "weights": weights}
    )
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


def _plain(job: Job) -> dict[str, Any]:
    """Train by the loop in plain PyTorch; return its weights, or what that loop does not do."""
    with _made(job, has_witness=False) as (trainer, arguments), _counting_updates():
        if without := recipe.uncovered_add_ons(trainer):
            return {"without": without}
        if missing := recipe.uncovered(trainer, arguments):
            return {"uncovered": missing}
        try:
            given, more = recipe.make_loop(trainer, arguments, job.precision)
            loop.train(*given, **more)
        except loop.Uncovered as found:
            return {"uncovered": [str(found)]}
        answer: dict[str, Any] = as_plain(
            {"weights": dict(trainer.unwrap().state_dict()), "updates": _notes["updates"]}
        )
    return answer


# -------------------------------------------------------------------------------------------------------------- values


def _streams() -> str:
    """Return a hash of every random stream of the process."""
    from zae.testing.watch import streams

    return hashlib.sha256(repr(sorted(streams().items())).encode()).hexdigest()[:16]


def _double(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float64."""
    return tensor.double() if tensor.is_floating_point() else tensor


def as_plain(value: Any) -> Any:
    """Return a nested value of tensors, numbers, text, lists and dicts; anything else as text."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key if isinstance(key, (str, int)) else str(key): as_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(each) for each in value]
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)
