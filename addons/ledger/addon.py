"""A ledger of a run: a line for each step, with hashes after every stage, to compare two runs."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zae.addon import AddOnBase
from zae.addons.ledger.step_record import (
    gradient_hashes,
    note_settings,
    random_state,
    settings_of,
    state_hashes,
    weight_hashes,
)
from zae.arguments.paths import check_file
from zae.checkpoint.hashed_files import reason
from zae.compose.introspect import add_ons_of
from zae.data.loaders import Proxy, length_of
from zae.distributed import shards
from zae.errors import ConfigError
from zae.loop.cadence import Every
from zae.loop.step_output import loss_numbers
from zae.trainer import Trainer
from zae.values.hashes import fingerprint
from zae.values.walk import leaves_of

__all__ = ["LedgerAddon"]

_log = logging.getLogger("zae")


class LedgerAddon(AddOnBase):
    """Write a line for each step: samples, losses, and hashes of gradients, weights and random state after each stage.

    ``python -m zae diff runA runB`` shows the first step and stage at which the ledgers of two runs differ. Training is
    bitwise the same with and without it. Only the main rank writes, about its own batches; or each rank its own file.

    Parameters
    ----------
    ledger_path : str or Path
        The file, for instance ``"run/ledger.jsonl"``; a resumed run appends to it. With ``{rank}`` in the name, as in
        ``"run/ledger-{rank}.jsonl"``, each rank writes its own; of a sharded model with a hash for each part that the
        rank holds. Where the disk fails in the middle of a run, there is one warning, and training continues without
        the ledger.
    ledger_every : Every or int
        Which steps are written: steps, ``Every(steps=1)`` for all. Hashing takes about 0.1 ms for a megabyte of
        weights, gradients or batch.
    ledger_tensors : bool
        Whether each line also has a hash for each weight, gradient and tensor of an optimizer, so that
        ``python -m zae diff --deep`` names the first tensor that differs. The file grows by about 40 bytes for each of
        them, and the weights are hashed before the step too. A ledger of each rank of a sharded model has none.

    Raises
    ------
    ConfigError
        The cadence is in epochs, or the file cannot be written.

    Examples
    --------
    >>> import json, tempfile, torch
    >>> from pathlib import Path
    >>> from zae import Trainer
    >>> from zae.addons import LedgerAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model.weight * batch).sum()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = Task.add_on(LedgerAddon)(
    ...         model, "cpu", optimizer=optimizer, ledger_path=f"{folder}/ledger.jsonl")
    ...     _ = trainer.run(1, [torch.ones(1, 1)] * 2)
    ...     entry = json.loads(Path(folder, "ledger.jsonl").read_text().splitlines()[-1])
    >>> entry["step"], entry["stages"]["forward"]["loss"], list(entry["stages"])
    (2, [-1.0], ['batch', 'forward', 'backward', 'clip', 'step'])
    """

    layer = "observe"
    traits = ("needs_all_gradients",)
    process_attributes = {"_file": None, "_loaders": (None, None)}
    _writes: bool
    _stages: dict[str, dict[str, Any]]

    def __init__(
        self,
        *args: Any,
        ledger_path: str | Path,
        ledger_every: Every | int = Every(steps=1),  # noqa: B008  (it is frozen)
        ledger_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.ledger_path = check_file(ledger_path, "ledger_path", "ledger.jsonl")
        self.ledger_every = Every.parse(ledger_every, "ledger_every", Every(steps=1))
        if self.ledger_every.steps is None:
            raise ConfigError(f"ledger_every={ledger_every!r}; a ledger counts in steps: write ledger_every=10")
        self.ledger_tensors = ledger_tensors
        self._file: Any = None
        self._writes = True  # Whether a step of this epoch may be written.
        self._stages = {}  # Of this step, where it is written.
        self._loaders: tuple[Any, Any] = (None, None)  # The loader, and a copy of it that notes samples.

    def setup(self) -> None:
        """Write steps outside of an epoch too."""
        super().setup()
        self._writes = True

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Note the samples of training batches, in an epoch with a step that is written."""
        loader = super().wrap_loader(loader, training)
        if not training:
            return loader
        begin = self.progress_checker.step - self.progress_checker.epoch_step
        every = self.ledger_every.steps or 1
        batches = length_of(loader) or sys.maxsize
        self._writes = (begin + batches) // every * every > max(begin, self.ledger_every.after)
        if type(loader) is not DataLoader or loader.batch_sampler is None or not (loader.num_workers or self._writes):
            return loader  # Unchanged, for the exact data path; two copies would each start workers.
        if self._loaders[0] is not loader:
            noting = copy.copy(loader)
            # DataLoader forbids setting these after its construction, for the sake of its iterators; a copy has none.
            object.__setattr__(noting, "batch_sampler", _NotingSampler(loader.batch_sampler))
            object.__setattr__(noting, "_iterator", None)
            self._loaders = (loader, noting)
        return self._loaders[1]

    def batch_context(self) -> AbstractContextManager[None]:
        """Write the line of a step when the step ends."""
        inner = super().batch_context()
        is_due = self.ledger_every.due_at_step(self.progress_checker.step + 1) and self._is_writer
        return self._write_step(inner) if is_due else inner

    @contextmanager
    def _write_step(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Collect and write the line of one step."""
        progress = self.progress_checker
        with inner:
            batch = {"data": [], "content": [], "random": random_state(), **self._each(weight_hashes)}
            self._stages = {"batch": batch, "forward": {"loss": [], "random": []}}
            try:
                yield
                entry = {"step": progress.step + 1, "epoch": progress.epoch + 1, "stages": self._stages}
                self._write({**entry, "rank": self.rank} if self._is_of_each_rank else entry)
            finally:
                self._stages = {}

    def to_device(self, batch: Any) -> Any:
        """Note the samples of a batch and the hash of each tensor; one hash where the samples are not known."""
        noted = self._stages["batch"]["data"] if self._stages else []
        index = self.current_run.activity.micro_index
        if self._stages and len(noted) == index:  # Else the gradients of a window are computed again.
            self._stages["batch"]["content"].append([fingerprint([tensor]) for tensor in _tensors(batch)])
            sampler = getattr(self._loaders[1], "batch_sampler", None)
            samples = sampler.take(self.progress_checker.epoch_batch + index) if sampler is not None else None
            noted.append(fingerprint(_tensors(batch)) if samples is None else samples)
        return super().to_device(batch)

    def forward_context(self) -> AbstractContextManager[None]:
        """Note the random state after a forward."""
        inner = super().forward_context()
        return self._note_forward(inner) if self._stages else inner

    @contextmanager
    def _note_forward(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        with inner:
            yield
        self._stages["forward"]["random"].append(random_state())

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Note the losses, and the gradients after the backward."""
        if not self._stages:
            return super().gradients(batch)
        outputs = super().gradients(batch)
        self._stages["forward"]["loss"] = [loss_numbers(out["loss"]) for out, _ in outputs]
        by_tensor = self._each(gradient_hashes)
        self._stages["backward"] = {"gradients": self._gradients(), "random": random_state(), **by_tensor}
        return outputs

    def clip(self) -> None:
        """Note the gradients that the optimizer uses."""
        super().clip()
        if self._stages:
            norm = None if self.grad_norm is None else float(self.grad_norm)
            unchanged = not self._is_clipped and self._stages["backward"]["gradients"]
            hashes = {"norm": norm, "gradients": unchanged or self._gradients(), "random": random_state()}
            self._stages["clip"] = hashes | (self._each(gradient_hashes) if self._is_clipped else {})

    def optimizer_step(self) -> bool:
        """Note the settings of the optimizers, and the weights after the step."""
        if not self._stages:
            return super().optimizer_step()
        noted = settings_of(self.optimizers)
        self._stages["step"] = noted
        with note_settings(self.optimizers, noted):
            stepped = super().optimizer_step()
        weights = self._hash([*self.unwrap().state_dict().values()])
        noted.update(stepped=bool(stepped), weights=weights, random=random_state())
        noted.update(self._each(weight_hashes, lambda model: state_hashes(model, self.optimizers)))
        return stepped

    @property
    def _is_of_each_rank(self) -> bool:
        return "{rank}" in str(self.ledger_path)

    @property
    def _is_writer(self) -> bool:
        return self.is_main or self._is_of_each_rank

    @property
    def _is_clipped(self) -> bool:
        """Whether the gradients may have changed since the backward."""
        alone = all(getattr(super(LedgerAddon, type(self)), n) is getattr(Trainer, n) for n in ("unscale", "clip"))
        return bool(self.gradient_clip) or not alone

    def _each(self, *hashes: Callable[[nn.Module], dict[str, str]]) -> dict[str, Any]:
        """Return an entry with the hash of each tensor, where they are written."""
        model = self.unwrap()
        if not self.ledger_tensors or (self._is_of_each_rank and any(shards.by_part([*model.parameters()]))):
            return {}
        return {"tensors": {name: value for function in hashes for name, value in function(model).items()}}

    def _gradients(self) -> Any:
        return self._hash([p.grad for p in self.parameters if p.grad is not None])

    def _hash(self, tensors: Sequence[Any]) -> Any:
        """Hash tensors; in a ledger of each rank by the part that the rank holds, as others may hold the same part."""
        parts = shards.by_part(tensors) if self._is_of_each_rank else {}
        if any(parts):
            return {part: fingerprint(part_tensors) for part, part_tensors in parts.items()}
        return fingerprint(tensors)

    def on_run_begin(self) -> None:
        """Open the file, so that a wrong path fails before the first batch."""
        super().on_run_begin()
        self._open()

    def _open(self) -> None:
        if self._file is None and self._is_writer:
            path = Path(str(self.ledger_path).replace("{rank}", str(self.rank)))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise ConfigError(
                    f"ledger_path={str(self.ledger_path)!r} cannot be created: {reason(error)}; give a file in a "
                    "folder that exists or can be created"
                ) from None
            if _is_cut_short(path):
                self._file.write("\n")
            names = [add_on.__name__ for add_on in add_ons_of(type(self))]
            self._write({"ledger": 1, "begins_after": self.progress_checker.step, "composition": names})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._open()
        try:
            self._file.write(json.dumps(entry) + "\n")
        except OSError as error:  # An observer does not end the run.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = Path(os.devnull).open("w")  # noqa: SIM115  (teardown closes it; the rest goes there)
            _log.warning(
                "the ledger %s cannot be written: %s. Training continues, but the next steps are missing in it; "
                "free some space, or give another ledger_path",
                self.ledger_path,
                reason(error),
            )

    def teardown(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().teardown()


def _is_cut_short(path: Path) -> bool:
    """Return whether the last line of a file is incomplete, after a kill or a full disk."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"


class _NotingSampler(Proxy):
    """A batch sampler that remembers its batches."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)
        self._given: dict[int, list[Any]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        # At once, as a DataLoader does: a sampler may draw random numbers here.
        batches = iter(self.passed)
        self._given = {}
        self._count = 0
        return self._walk(batches)

    def _walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        for indices in batches:
            self._given[self._count] = list(indices)
            self._count += 1
            yield indices

    def take(self, number: int) -> list[Any] | None:
        """Return the samples of a batch of this epoch, and drop those before it."""
        self._given = {key: value for key, value in self._given.items() if key >= number}
        samples = self._given.get(number)
        return samples if samples is None or all(isinstance(index, (int, str)) for index in samples) else None


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors and numeric arrays in a nested batch."""
    for _, leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            yield torch.from_numpy(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
