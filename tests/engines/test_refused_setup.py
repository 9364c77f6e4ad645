"""A disk that refuses while rank 0 sets a run up or writes alone: every rank learns why, and nothing is half there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist

from kit.engines import ENGINES, Task, build, data, net, weights
from kit.faults import RefusingDisk, installed
from zae.addons import EMAAddon, HuggingFaceAddon, PEFTAddon, StateManagerAddon
from zae.checkpoint.folder import list_checkpoints, verify
from zae.errors import CheckpointError, ConfigError, ZaeError

STEPS, NEVER = 3, 1 << 20
REFUSALS = [(errno.ENOSPC, 1), (errno.EIO, NEVER)]
"""What the disk says, and for how many operations: a full disk for a moment, a broken one for good."""


def trainer(path: Path, engine: str, **options: Any) -> Any:
    options = {"save_format": "sharded", "gradient_clip": 0.05, "decay": 0.9, **options}
    return build(ENGINES[engine], StateManagerAddon, EMAAddon, save_path=path, **options)


def batches(engine: str) -> Any:
    return data(4 * STEPS * ENGINES[engine].shares, 4)


def train(path: Path, engine: str, **options: Any) -> Any:
    made = trainer(path, engine, **options)
    made.run(1, batches(engine))
    assert made.progress_checker.step == STEPS
    return weights(made)


class Reached(Exception):
    """A step was reached: the run is set up."""


class Stops(Task):
    """A task whose first step ends the run."""

    def train_step(self, batch: Any) -> Any:
        raise Reached


def refused(act: Callable[[], Any], at: int, code: int, count: int = 1) -> tuple[ZaeError | None, int]:
    """Do something while the disk of rank 0 refuses; return the error of this rank, and the operations of that one."""
    disk, error = RefusingDisk(NEVER if dist.get_rank() else at, code, at + count), None
    with installed(disk), contextlib.suppress(Reached):
        try:
            act()
        except CheckpointError as raised:
            error = raised
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(disk.log))  # The process group works as before.
    return error, counts[0]


def check_error(error: ZaeError | None, code: int) -> None:
    """Assert that this is the error of rank 0, which the others name."""
    assert isinstance(error, CheckpointError)
    assert error.errno == code
    assert str(error).startswith("rank 0: ") == (dist.get_rank() > 0)
    assert error.from_rank == (0 if dist.get_rank() else None)


def refuse_setup(folder: Path, engine: str, every: int) -> int:
    """Refuse one operation after another before the first step; return how many were refused."""
    end, failed = train(folder / "end", engine), 0
    for code, count in REFUSALS:
        for at in itertools.count(step=every):
            path = folder / f"{code}-{at}"
            made = trainer(path, engine, task=Stops)
            error, reached = refused(partial(made.run, 1, batches(engine)), at, code, count)
            if reached <= at:
                break
            if error is None:  # A full disk does not refuse everything.
                continue
            failed += 1
            check_error(error, code)
            made.barrier()
            left = {each.name for each in path.iterdir()} if path.exists() else set()
            assert not left or (count == NEVER and not list_checkpoints(path))  # A broken disk removes nothing.
            made.barrier()
            found = train(path, engine, resume="auto")
            assert all(torch.equal(value, end[name]) for name, value in found.items())
    return failed


WHOLE = [pytest.param(name, 1, marks=pytest.mark.exhaustive) for name, each in ENGINES.items() if each.world == 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("engine", "every"), [("fsdp", 3), *WHOLE])
def test_a_disk_that_refuses_while_rank_0_sets_up(engine: str, every: int, tmp_path: Path, crews: Any) -> None:
    """Each operation: all ranks raise that error and can go on; "auto" then trains to the same end."""
    world = ENGINES[engine].world
    failed = crews(world).call(refuse_setup, tmp_path, engine, every)
    assert len(failed) == world
    assert min(failed) == max(failed) > (2 if every > 1 else 5)


def refuse_whole(folder: Path) -> list[int]:
    """Refuse each operation of the writers that are rank 0 alone; return how many were refused by each."""
    made = trainer(folder / "run", "ddp", save_format="safetensors", on_save_error="raise")
    other = trainer(folder / "other", "fsdp")
    made.run(1, batches("ddp"))
    other.run(1, batches("fsdp"))
    target, model, average = folder / "step-00000003", folder / "model.safetensors", folder / "average.safetensors"
    acts = [partial(made.save_state, target), partial(other.save_model, model), partial(other.save_average, average)]
    failed = [0] * len(acts)
    for index, act in enumerate(acts):
        act()
        before = {each.name for each in folder.iterdir()}
        for at in itertools.count():
            error, count = refused(act, at, errno.ENOSPC)
            if error is not None:
                failed[index] += 1
                check_error(error, errno.ENOSPC)
                assert {each.name for each in folder.iterdir()} == before
            made.barrier()
            if count <= at:  # It was not reached.
                break
    verify(target)
    return failed


def test_a_disk_that_refuses_what_rank_0_writes_alone(tmp_path: Path, crews: Any) -> None:
    """A whole checkpoint, the weights of an engine in parts, and their average: all ranks raise that error."""
    failed = crews(2).call(refuse_whole, tmp_path)
    assert failed[0] == failed[1]
    assert min(failed[0]) > 3


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """Let the system refuse what makes a file of rank 0 larger: also that of code which knows nothing of zae's disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse_exports(folder: Path) -> list[str]:
    """Refuse what an adapter and a model are exported to; return what each rank was told."""
    torch.manual_seed(3)
    config = {"r": 8, "target_modules": ["query", "value"], "modules_to_save": ["head"], "init_lora_weights": False}
    own = build(ENGINES["ddp"], PEFTAddon, model=peft.get_peft_model(net(), peft.LoraConfig(**config)))
    own.run(1, data(8))
    parts = build(ENGINES["fsdp"], HuggingFaceAddon)
    parts.run(1, data(8))
    write = parts._write_folder

    def write_limited(*args: Any) -> None:
        with parts.limit():
            write(*args)

    parts._write_folder = write_limited
    told = []
    for name, save in (
        ("merged.safetensors", own.save_merged), ("adapter", own.save_model),
        ("parts", parts.save_model),
    ):  # fmt: skip
        for size in (0, 1000):
            # The store of the process group is a file too, to which the ranks of an engine in parts write first.
            own.limit = parts.limit = partial(limited, size)
            with contextlib.nullcontext() if save == parts.save_model else limited(size):
                with pytest.raises(CheckpointError) as caught:
                    save(folder / name)
            own.limit = parts.limit = contextlib.nullcontext
            assert str(folder / name) in str(caught.value)
            assert str(caught.value).startswith("rank 0: ") == (dist.get_rank() > 0)
            told.append(str(caught.value))
            own.barrier()
            left = [each for each in folder.rglob("*") if each.is_file()]
            assert all(each.name.endswith((".json", ".md")) for each in left), (name, left)
            own.barrier()
        save(folder / name)
        own.barrier()
        assert (folder / name).exists()
        own.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
        own.barrier()
    return told


@pytest.mark.exhaustive
def test_a_disk_that_refuses_an_export(tmp_path: Path, crews: Any) -> None:
    """Adapters, merged weights and folders that other libraries write: all ranks raise, and have no half weights."""
    told = crews(2).call(refuse_exports, tmp_path)
    assert [f"rank 0: {each}" for each in told[0]] == told[1]


def refuse_another_run(folder: Path) -> None:
    train(folder, "ddp")
    again = trainer(folder, "ddp")
    with pytest.raises(ConfigError, match="contains 1 checkpoint of another run") as caught:
        again.run(1, batches("ddp"))
    assert str(caught.value).startswith("rank 0: ") == (dist.get_rank() > 0)
    again.barrier()
    assert [each.name for each in list_checkpoints(folder)] == ["step-00000003"]


def test_the_type_of_an_error_is_kept(tmp_path: Path, crews: Any) -> None:
    """The folder of another run is refused on each rank as by one process."""
    crews(2).call(refuse_another_run, tmp_path)
