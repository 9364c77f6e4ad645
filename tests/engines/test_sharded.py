"""Sharded checkpoints: every rank writes its parts, any number of ranks reads them, and a part of one never stands."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kit.checkpoints import save_checkpoint
from kit.engines import ENGINES, build, data, distance, net, weights
from kit.faults import Child, Disk, KillingDisk, RefusingDisk, installed
from kit.ranks import each_rank
from zae.__main__ import main
from zae.addons import EMAAddon, StateManagerAddon
from zae.addons.state_manager import resume
from zae.addons.state_manager.checkpointer import FolderCheckpointer
from zae.checkpoint.folder import newest_valid, verify
from zae.checkpoint.group import Group
from zae.checkpoint.manifest import parse, read_manifest, seal
from zae.checkpoint.names import SHARDS
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.weights import load_weights
from zae.checkpoint.writer import SavePlan, plan
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, NonFiniteError
from zae.loop.rank_states import RankStates
from zae.values.walk import tensors_in

LIMIT = 1e-12
ROWS, BATCH, STEPS = 84, 12, 14


def trainer(path: Path, engine: str = "fsdp", **options: Any) -> Any:
    given = {"save_format": "sharded", "gradient_clip": 0.05, "decay": 0.9, "keep_last": 1, **options}
    given.setdefault("scheduler", scheduler)
    given.setdefault("model", net(blocks=1))  # Each tensor of a rank's first step takes torch milliseconds.
    return build(ENGINES[engine], StateManagerAddon, EMAAddon, save_path=path, **given)


def scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)


def train(
    world: int,
    path: Path,
    start: Path | None = None,
    max_steps: int | None = None,
    **options: Any,
) -> Any:
    """Train with so many ranks, all with the same global batch, and return the end of it."""
    assert (dist.get_world_size() if dist.is_initialized() else 1) == world
    resumed = {} if start is None else {"resume": str(start), "reshard": True}
    made = trainer(path, **{**resumed, **options})
    shares = world // (made.mesh.get("tensor", 1) * made.mesh.get("pipeline", 1))
    made.run(2, data(ROWS, BATCH // shares), **({} if max_steps is None else {"max_steps": max_steps}))
    assert made.engine.dp_world_size == shares
    average = {f"average.{name}": made.engine.full_tensors(value).clone() for name, value in made.average.items()}
    return weights(made) | average, made.train_history, made.progress_checker.step


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if not name.endswith("key.bias"))


def bitwise(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, crews: Any) -> Any:
    """Two ranks stop at step 4 of 7 of the first epoch; they, and one process, also go to the end."""
    folder = tmp_path_factory.mktemp("sharded")
    crews(2).call(train, 2, folder / "half", None, 4)
    whole = crews(2).call(train, 2, folder / "end")
    return folder / "half" / "step-00000004", whole, train(1, folder / "single")


def test_each_rank_writes_its_parts(saved: Any) -> None:
    """Every tensor that is divided is in the ranks' files, once, and no pickle is among the files."""
    path, *_ = saved
    manifest = verify(path)
    shards = ["shard-00000.safetensors", "shard-00001.safetensors"]
    files = {"model.safetensors", "state.safetensors", "state.json", SHARDS, *shards}
    assert set(manifest["files"]) == files == {each.name for each in path.iterdir()} - {"manifest.json"}
    assert (manifest["format"], manifest["world_size"], manifest["model_format"]) == (2, 2, "sharded")
    plan = json.loads((path / SHARDS).read_text())
    for kind in ("model/", "state/optimizer.", "state/EMAAddon.average."):
        assert any(name.startswith(kind) for name in plan)
    sizes = [manifest["files"][name]["size"] for name in shards]
    assert max(sizes) < 0.6 * sum(sizes)
    assert not (path / ".metadata").exists()


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_two_ranks_are_resumed_by_any_number(saved: Any, world: int, tmp_path: Path, crews: Any) -> None:
    """In the middle of an epoch: bitwise with as many, and to 1e-12 with others; one needs no process group."""
    path, two, single = saved
    ends = [train(1, tmp_path, path)] if world == 1 else crews(world).call(train, world, tmp_path, path)
    for end, history, step in ends:
        assert step == STEPS == single[2]
        for row, expected in zip(history, single[1], strict=True):
            assert row == pytest.approx(expected, rel=1e-12)
        if world == 2:
            assert bitwise(end, two[0][0])
        assert far(end, single[0]) < LIMIT


@pytest.mark.exhaustive
def test_one_process_is_resumed_by_two(saved: Any, tmp_path: Path, crews: Any) -> None:
    """And these by three, from what they have saved in shards."""
    train(1, tmp_path / "one", None, 3)
    crews(2).call(train, 2, tmp_path / "two", tmp_path / "one" / "step-00000003", 9)
    for end, _, step in crews(3).call(train, 3, tmp_path / "three", tmp_path / "two" / "step-00000009"):
        assert step == STEPS
        assert far(end, saved[2][0]) < LIMIT


def test_a_rank_reads_what_it_holds_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    """64 MB of weights and as many of their average: each of two ranks has a half in memory, and little more."""

    def read() -> tuple[int, int]:
        options = {"model": nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))), "decay": 0.5}
        made = trainer(tmp_path, optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=None, **options)
        with made.ready():
            path, shards = made.save_state(tmp_path / "step-00000001"), made.local_shards()
            Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
            before = peak()
            _, model, state = resume.read(made.checkpointer, path, local_shards=shards)
            grown = peak() - before
        tensors = [*model.values(), *state["EMAAddon"]["average"].values()]
        assert all(each.shape == (1024, 1024) and isinstance(each, DTensor) for each in tensors)
        made.load_state(path)
        assert isinstance(made.average["0.weight"], DTensor)
        return grown, sum(each.to_local().nbytes for each in tensors)

    for grown, held in each_rank(2, read):
        assert held == 64 << 20
        assert grown < held + (24 << 20)  # A tensor has 4 MB, and what is read of one is held once or twice.


def save_whole(path: Path) -> None:
    made, _ = begun(path, save_format="safetensors")
    with made.ready():
        state = RankStates.read_state(made, in_parts=False)
    tensors = [*tensors_in((state["model"], state["optimizer"]))]
    large = [each for each in tensors if each.dim() == 2]
    assert len(large) > 12
    assert not any(isinstance(each, DTensor) for each in tensors)
    assert {each.is_meta for each in large} == {dist.get_rank() > 0}
    assert not any(each.is_meta for each in tensors_in(made.state_dict()))


def test_a_whole_checkpoint_is_in_the_memory_of_rank_0_alone(tmp_path: Path, crews: Any) -> None:
    """Weights and slots; the others take part in gathering each, and drop it."""
    crews(2).call(save_whole, tmp_path)
    assert verify(tmp_path / "step-00000004")["world_size"] == 2


def peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


WIDE, NARROW = {"engine": "2-D"}, {"engine": "tensor", "mesh": {"tensor": 2}}
STAGED = {"engine": "pipeline", "mesh": {"pipeline": 2}, "split": ["norm"]}
STAGES: dict[str, list[tuple[int, int, dict[str, Any]]]] = {
    "2-1": [(2, 4, NARROW), (1, STEPS, WIDE | {"mesh": {}})],
    "4-2-1": [(4, 2, WIDE), (2, 4, NARROW), (1, STEPS, WIDE | {"mesh": {}})],
    "4-2-1-2-4": [(4, 2, WIDE), (2, 3, NARROW), (1, 11, WIDE | {"mesh": {}}), (2, 12, NARROW), (4, STEPS, WIDE)],
    "stages": [
        (2, 2, STAGED),
        (4, 4, STAGED | {"split": ["blocks.0", "norm", "head"], "mesh": {"pipeline": 4}}),
        (1, STEPS, {"engine": "ddp"}),
    ],
}


@pytest.mark.parametrize(
    "name", ["2-1", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in STAGES if each != "2-1")]
)
def test_parts_of_layers_are_resumed_by_any_number(saved: Any, name: str, tmp_path: Path, crews: Any) -> None:
    """Layers in parts, and these in shards, and one process: each goes on from what the one before has saved."""
    path = None
    for world, until, options in STAGES[name]:
        ranks = partial(train, world, tmp_path / str(until), path, until, **options)
        ends = [ranks()] if world == 1 else crews(world).call(ranks)
        path = tmp_path / str(until) / f"step-{until:08d}"
        assert (read_manifest(path)["model_format"] == "sharded") == (world > 1)
    for end, _, step in ends:
        assert step == STEPS
        assert far(end, saved[2][0]) < LIMIT


def cross(folder: Path) -> list[float]:
    """Return how far each resumed run ends from one that was not interrupted."""

    def run(engine: str, kind: str, start: Path | None = None, max_steps: int | None = None) -> Any:
        name = str(next(count))
        options = {"gradient_clip": 0.05, "save_format": kind, "resume": False if start is None else str(start)}
        made = build(ENGINES[engine], StateManagerAddon, save_path=folder / name, **options)
        limits = {"max_steps": max_steps} if max_steps else {}
        made.run(1, data(ROWS, BATCH // 2), **limits)
        return made, folder / name / f"step-{made.progress_checker.step:08d}"

    count = itertools.count()
    end, distances = run("fsdp", "safetensors")[0], []
    for source, kind, target in (
        ("ddp", "sharded", "fsdp"),
        ("fsdp", "safetensors", "ddp"),
        ("fsdp", "sharded", "ddp"),
    ):
        path = run(source, kind, max_steps=4)[1]
        is_sharded = source == "fsdp" and kind == "sharded"
        assert (read_manifest(path)["model_format"] == "sharded") == is_sharded
        distances.append(distance(run(target, "sharded", path)[0], end))
    return distances


def test_whole_checkpoints_and_shards_load_into_each_other(tmp_path: Path, crews: Any) -> None:
    """Of FSDP and DDP, with as many ranks."""
    distances = crews(2).call(cross, tmp_path)
    assert [len(each) for each in distances] == [3, 3]
    assert max(map(max, distances)) < LIMIT


def refused(path: Path, start: Path) -> str:
    """Return why a state cannot be resumed: caught in the ranks, which stay for the tests that follow."""
    with pytest.raises(CheckpointMismatch) as caught:
        train(2, path, start, 5, reshard=False)
    return str(caught.value)


def test_another_number_of_shares_is_what_needs_reshard(tmp_path: Path, crews: Any) -> None:
    """Ranks that divide layers get the same batches: their number may change, and the error names both."""
    crews(2).call(partial(train, 2, tmp_path / "tensor", None, 4, engine="tensor", mesh={"tensor": 2}))
    path = tmp_path / "tensor" / "step-00000004"
    assert train(1, tmp_path / "one", path, 5, engine="tensor", mesh={}, reshard=False)[2] == 5
    for said in crews(2).call(refused, tmp_path / "two", path):
        assert re.search(r"by 1 rank that has all of the data, and this run has 2.*resha", said)


def test_another_number_of_ranks_is_refused_without_reshard(saved: Any, tmp_path: Path) -> None:
    """The error names both numbers."""
    with pytest.raises(CheckpointMismatch, match="was saved by 2 ranks that divide the data, and this run has 1"):
        train(1, tmp_path, saved[0], reshard=False)


def test_a_flipped_byte_in_any_file_is_refused(saved: Any, tmp_path: Path) -> None:
    """Before anything of it is loaded."""
    for file in sorted(saved[0].iterdir()):
        path = shutil.copytree(saved[0], tmp_path / file.name / "step-00000004")
        text = bytearray((path / file.name).read_bytes())
        text[len(text) // 2] ^= 1
        (path / file.name).write_bytes(text)
        with pytest.raises(CheckpointDamaged):
            load_checkpoint(path)
        made = trainer(tmp_path / "run")
        before = weights(made)
        with pytest.raises(CheckpointDamaged):
            made.load_state(path)
        assert bitwise(before, weights(made))


def forge(path: Path, change: Any) -> None:
    """Change shards.json, and seal the manifest again as somebody who can write to the folder may."""
    plan = json.loads((path / SHARDS).read_text())
    plan = change(plan) or plan
    (path / SHARDS).write_text(json.dumps(plan))
    manifest: Any = parse((path / "manifest.json").read_bytes(), "here")
    data = (path / SHARDS).read_bytes()
    manifest["files"][SHARDS] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_bytes(seal(manifest))


def first(plan: Any) -> Any:
    return next(each for each in plan.values() if len(each["shape"]) == 2)


HOSTILE = {
    "large": lambda plan: first(plan).update(shape=[1 << 40, 1 << 40]),
    "negative": lambda plan: first(plan).update(shape=[-1, 8]),
    "no numbers": lambda plan: first(plan).update(shape=["a", True]),
    "outside": lambda plan: first(plan)["parts"][0].__setitem__(1, [1 << 40, 0]),
    "before": lambda plan: first(plan)["parts"][0].__setitem__(1, [-1, 0]),
    "other rank": lambda plan: first(plan)["parts"][0].__setitem__(0, 7),
    "twice": lambda plan: first(plan)["parts"].append(first(plan)["parts"][0]),
    "a part less": lambda plan: first(plan)["parts"].pop(),
    "other dtype": lambda plan: first(plan).update(dtype="F32"),
    "no dtype": lambda plan: first(plan).update(dtype="os.system"),
    "no dict": lambda plan: [1, 2],
    "text": lambda plan: {"model/x": "text"},
    "other name": lambda plan: plan.update({"model/zz": plan.pop(next(iter(plan)))}),
    "path": lambda plan: plan.update({"model/../../etc": {"shape": [1], "dtype": "F64", "parts": [["../x", [0]]]}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_plan_is_refused(saved: Any, name: str, tmp_path: Path) -> None:
    """Whatever shards.json says, with a manifest that fits."""
    path = shutil.copytree(saved[0], tmp_path / "step-00000004")
    forge(path, lambda plan: None)
    load_checkpoint(path)
    forge(path, HOSTILE[name])
    with pytest.raises(CheckpointDamaged, match=r"shards\.json"):
        load_checkpoint(path)


def test_a_hostile_metadata_is_not_read(saved: Any, tmp_path: Path) -> None:
    """The pickle that torch.distributed.checkpoint would read is no file of ours: nobody opens it."""
    path = shutil.copytree(saved[0], tmp_path / "step-00000004")
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR.")
    load_checkpoint(path)
    assert not (tmp_path / "owned").exists()
    manifest: Any = parse((path / "manifest.json").read_bytes(), "here")
    manifest["files"][".metadata"] = manifest["files"][SHARDS]
    (path / "manifest.json").write_bytes(seal(manifest))
    with pytest.raises(CheckpointDamaged, match=r"lists the file '.metadata', which is not part of it"):
        load_checkpoint(path)
    manifest["files"].pop(".metadata")
    manifest["world_size"] = 10**15
    (path / "manifest.json").write_bytes(seal(manifest))
    with pytest.raises(CheckpointDamaged, match="lacks shard-"):
        load_checkpoint(path)


# ------------------------------------------------------------------------------------------------ in the background


class Held(RefusingDisk):
    """A disk that waits for the loop before its first operation on behalf of a thread, and may then refuse."""

    def __init__(self, at: int = 1 << 30) -> None:
        super().__init__(at, errno.ENOSPC)
        self.may_go_on, self.threads = threading.Event(), set[str]()

    def before(self, name: str, args: Any) -> None:
        if name == "create" and args[0].suffix == ".safetensors":
            self.threads.add(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.may_go_on.wait(120)
        super().before(name, args)


def save_late(path: Path) -> Any:
    made = trainer(path, save_every=4, keep_best=0, keep_last=9, save_async=True)
    disk = Held()
    made.on_step_end = release(made.on_step_end, disk, made, path)
    with installed(disk):
        made.run(2, data(ROWS, BATCH // 2))
    assert {name.partition("_")[0] for name in disk.threads} == {"zae-save"}
    return weights(made)


def release(method: Any, disk: Held, made: Any, path: Path) -> Any:
    def on_step_end(outputs: Any) -> None:
        method(outputs)
        if made.progress_checker.step == 5:
            assert not (path / "step-00000004").exists()
            disk.may_go_on.set()

    return on_step_end


@pytest.mark.exhaustive
def test_training_goes_on_while_threads_write(saved: Any, tmp_path: Path, crews: Any) -> None:
    """The state of the moment is written, over connections of their own; the run ends bitwise as without."""
    for end in crews(2).call(save_late, tmp_path / "run"):
        assert bitwise(end, {name: saved[1][0][0][name] for name in end})
    for step in (4, 8, 12, 14):
        verify(tmp_path / "run" / f"step-{step:08d}")
    half = saved[0]
    names = [each.name for each in half.iterdir() if each.suffix == ".safetensors"]
    assert all((half / n).read_bytes() == (tmp_path / "run" / half.name / n).read_bytes() for n in names)


# ------------------------------------------------------------------------------------------------------- failure


def begun(path: Path, **options: Any) -> tuple[Any, Any]:
    """Return a trainer that has saved step 4, and what it trains on."""
    made, loader = trainer(path, on_save_error="raise", **options), data(ROWS, BATCH // 2)
    made.run(2, loader, max_steps=4)
    return made, loader


def refuse_each(folder: Path) -> int:
    made, _ = begun(folder / "run")
    rank, target, failed = dist.get_rank(), folder / "step-00000004", 0
    with made.ready():
        made.save_state(target)
        for victim in (0, 1):
            for at in itertools.count(step=1 if victim else 3):
                disk = RefusingDisk(at if rank == victim else 1 << 20, errno.ENOSPC, at + 1)
                error = None
                try:
                    with installed(disk):
                        made.save_state(target)
                except CheckpointError as raised:
                    error = raised
                if error is not None:
                    failed += 1
                    assert error.errno == errno.ENOSPC
                    assert "No space left on device" in str(error)
                    assert str(error).startswith(f"rank {victim}: ") == (rank != victim)
                    made.barrier()
                    verify(target)
                    assert {each.name for each in folder.iterdir()} == {"run", target.name}
                    made.barrier()
                if made.gather(len(disk.log))[victim] <= at:  # It was not reached.
                    break
    return failed


@pytest.mark.exhaustive
def test_a_disk_that_refuses_is_reported_by_all_ranks(tmp_path: Path, crews: Any) -> None:
    """Whichever operation of whichever rank it is: the old checkpoint stands, nothing is left, the next save works."""
    failed = crews(2).call(refuse_each, tmp_path)
    assert failed[0] == failed[1] > 9


def refuse_late(folder: Path, kind: str) -> tuple[int, str]:
    made = trainer(folder / kind, save_async=True, save_every=2, keep_best=0, on_save_error=kind)
    disk = RefusingDisk(0 if dist.get_rank() else 1 << 30, errno.ENOSPC, 1)
    error = ""
    try:
        with installed(disk):
            made.run(2, data(ROWS, BATCH // 2))
    except CheckpointError as raised:
        error = str(raised)
    made.barrier()
    assert not [each.name for each in folder.rglob(".staging*")]
    return made.progress_checker.step, error


@pytest.mark.exhaustive
def test_a_failure_in_the_background_is_raised_by_all_ranks(tmp_path: Path, crews: Any) -> None:
    """At the same step, although one disk alone has refused; with on_save_error="warn" the run goes on to its end."""
    (one, first), (two, second) = crews(2).call(refuse_late, tmp_path, "raise")
    assert one == two < STEPS
    assert "No space left on device" in second
    assert first == f"rank 1: {second}"
    assert crews(2).call(refuse_late, tmp_path, "warn") == [(STEPS, "")] * 2
    verify(tmp_path / "warn" / f"step-{STEPS:08d}")


class RefusingThread(RefusingDisk):
    """Refuses one operation of the threads that write, and none of the thread that trains."""

    def before(self, name: str, args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self.log.pop()
        else:
            super().before(name, args)


def refuse_late_at(path: Path, victim: int, at: int, code: int, until: int) -> Any:
    """Train while the disk of one rank refuses an operation of its thread, and resume.

    Return whether it was reached, and the end if it was refused.
    """
    rank, error, end = dist.get_rank(), None, None
    made = trainer(path, save_async=True, save_every=3, keep_best=0, on_save_error="raise")
    disk = RefusingThread(at if rank == victim else 1 << 20, code, at + until)
    try:
        with installed(disk):
            made.run(2, data(ROWS, BATCH // 2), max_steps=6)
    except CheckpointError as raised:
        error = raised
    made.barrier()
    left = sorted(path.glob("step-*"))
    assert {each.name for each in left} <= {"step-00000003", "step-00000006"}
    assert [each for each in left if verify(each)] == left
    assert until > 1 or not [*path.rglob(".staging*")]  # A broken disk removes nothing.
    assert error is not None or left[-1].name == "step-00000006"
    made.barrier()
    if error is not None:
        assert os.strerror(code) in str(error)
        assert str(error).startswith(f"rank {victim}: ") == (rank != victim)
        end = train(2, path, resume="auto")[0]
    return made.gather(len(disk.log))[victim] > at, end


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("code", "until"), [(errno.ENOSPC, 1), (errno.EIO, 1), (errno.EIO, 1 << 20)])
def test_a_disk_that_refuses_any_operation_of_a_thread(
    saved: Any, victim: int, code: int, until: int, tmp_path: Path, crews: Any
) -> None:
    """As for a save that training waits for: an old or a new checkpoint is whole, and "auto" goes on to the end."""
    failed = 0  # Of two saves.
    for at in itertools.count(step=1 if victim else 5):  # A file takes 4 operations, of which 2 need space.
        results = crews(2).call(refuse_late_at, tmp_path / str(at), victim, at, code, until)
        ends = [end for _, end in results if end is not None]
        assert len(ends) in (0, 2)
        assert all(bitwise(end, saved[1][0][0]) for end in ends)
        failed += len(ends) // 2
        if not results[0][0]:
            break
    assert failed > (1 if victim else 5)


class Stuck(Disk):
    """A disk that does not answer one operation of the threads that write, for longer than the ranks wait."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def before(self, name: str, args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self.log.pop()
        elif self.now == self.at:
            hang()


def hang_late(path: Path, victim: int, at: int) -> None:
    made, loader = begun(path, save_async=True, timeout=6)
    with installed(Stuck(at if dist.get_rank() == victim else -1)):
        made.run(2, loader, max_steps=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_hangs_at_an_operation_of_a_thread(saved: Any, victim: int, tmp_path: Path, crews: Any) -> None:
    """The other rank ends within its timeout and says so; an old or a new checkpoint is whole."""
    for at in range(0, 4 if victim else 26, 1 if victim else 5):
        path = tmp_path / f"{victim}-{at}"
        with pytest.raises(AssertionError, match=f"rank {1 - victim} of 2: (?s:.*)did not answer within the timeout"):
            each_rank(2, partial(hang_late, path, victim, at))
        newest = newest_valid(path)
        assert newest is not None
        assert newest[0].name in ("step-00000004", "step-00000006")
        for own, _, steps in crews(2).call(partial(train, 2, path, resume="auto")):
            assert steps == STEPS
            assert bitwise(own, saved[1][0][0])


def save_nan(folder: Path) -> str:
    made, _ = begun(folder)
    with made.ready():
        _, _, state = resume.read(made.checkpointer, folder / "step-00000004", local_shards=made.local_shards())
        slots = [each["exp_avg"] for each in state["optimizer"]["0"]["state"].values()]
        assert all(isinstance(each, DTensor) for each in slots)
        with torch.no_grad():
            if dist.get_rank():
                made.unwrap().head.weight.to_local().fill_(math.nan)
        with pytest.raises(NonFiniteError) as raised:
            made.save_state(folder / "other")
        assert not (folder / "other").exists()
        made.barrier()
    return str(raised.value)


def test_a_rank_that_raises_anything_ends_the_save_of_all(tmp_path: Path, crews: Any) -> None:
    """Weights that are not finite on one rank alone too."""
    for text in crews(2).call(save_nan, tmp_path):
        assert "head.weight contains NaN" in text


def planned_on(path: Path) -> dict[str, Any]:
    """Return what this rank writes of a checkpoint with two tensors in parts: its files, and the manifest."""
    mesh = init_device_mesh("cpu", (2,))
    model = {"weight": distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]), "scale": torch.ones(1)}
    state = {"average": distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]), "plain": torch.ones(2)}
    about = {"run_id": "a", "step": 6, "epoch": 0, "composition": [], "world_size": 2, "info": {}}
    group = Group(dist.get_rank(), made_of(dist.get_world_size()))
    made = plan(path, model, state, about, model_format="sharded", group=group)
    return {"files": made.files, "manifest": made.manifest}


def made_of(world: int) -> Any:
    def gather(value: Any) -> list[Any]:
        values = [None] * world
        dist.all_gather_object(values, value)
        return values

    return gather


def write_part(planned: dict[str, Any], rank: int, pipes: Any, path: Path, disk: Disk) -> list[str]:
    """Be one of two ranks that write, and that exchange through a pipe what they have written."""
    own, other = pipes[rank], pipes[1 - rank]
    other.close()

    def gather(value: Any) -> list[Any]:
        own.send(value)
        values = [value, own.recv()]
        return values if rank == 0 else values[::-1]

    checkpointer = FolderCheckpointer(path.parent)
    with installed(disk):
        checkpointer.store(SavePlan(path, **planned, group=Group(rank, gather)), reads_back=True)
        if rank == 0:
            checkpointer.remove(path.with_name("step-00000004"))
    return [name for name, _ in disk.log]


def write_on_two(planned: list[dict[str, Any]], path: Path, victim: int, at: int) -> list[Any]:
    pipes, disks = multiprocessing.Pipe(), [Disk(), Disk()]
    disks[victim] = KillingDisk(at)
    ranks = [Child(write_part, each, rank, pipes, path, disks[rank]) for rank, each in enumerate(planned)]
    for pipe in pipes:
        pipe.close()
    return [each.wait() for each in ranks]


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_before_any_operation(tmp_path: Path, crews: Any) -> None:
    """Each of two ranks, before each file operation: the previous checkpoint stands, or the new one is whole."""
    planned = crews(2).call(planned_on, tmp_path)
    save_checkpoint(tmp_path / "old" / "step-00000004", {"weight": torch.ones(1)}, {}, manifest_info=ABOUT)
    logs = [each.result for each in write_on_two(planned, copied(tmp_path, "alive"), 0, 1 << 20)]
    assert len(logs[0]) > 30
    assert len(logs[1]) == 4
    found = set()
    for victim, log in enumerate(logs):
        for at in range(len(log)):
            path = copied(tmp_path, f"{victim}-{at}")
            ends = write_on_two(planned, path, victim, at)
            assert ends[victim].status == -signal.SIGKILL
            newest = newest_valid(path.parent)
            assert newest is not None
            assert not newest[2]
            other = ends[1 - victim].status
            assert other == 1 or (other == 0 and newest[0] == path)  # It was killed while it removed the old one.
            found.add(newest[0].name)
            shutil.rmtree(path.parent)
    assert found == {"step-00000004", "step-00000006"}


ABOUT = {"run_id": "a", "step": 4, "epoch": 0, "composition": [], "world_size": 2, "info": {}}


def copied(folder: Path, name: str) -> Path:
    return shutil.copytree(folder / "old", folder / name) / "step-00000006"


class Stalled(Disk):
    """A disk that does something before it creates the file of the shards."""

    def __init__(self, act: Any, rank: int) -> None:
        super().__init__()
        self.act, self.rank = act, rank

    def before(self, name: str, args: Any) -> None:
        if name == "create" and args[0].name.startswith("shard-") and dist.get_rank() == self.rank:
            self.act()


def save_with(path: Path, act: Any, rank: int, **options: Any) -> None:
    """Go to step 4, and save step 6 with a disk that does something."""
    made, loader = begun(path, **options)
    with installed(Stalled(act, rank)):
        made.run(2, loader, max_steps=2)


def kill(number: int) -> Any:
    return lambda: os.kill(os.getpid(), number)


def hang() -> None:
    time.sleep(60)


WAYS: dict[str, tuple[Any, int, dict[str, Any], str, int]] = {
    "killed in a thread": (kill(signal.SIGKILL), 1, {"save_async": True}, "rank 1 of 2: ended with -9", 4),
    "hangs": (hang, 1, {"timeout": 6}, "rank 0 of 2: .*did not answer within the timeout of 6 s", 4),
    "killed": (kill(signal.SIGKILL), 0, {}, "rank 0 of 2: ended with -9", 4),
    "asked": (kill(signal.SIGTERM), 1, {}, "rank 1 of 2: SystemExit", 6),
}


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    "way",
    ["killed in a thread", "hangs", *(pytest.param(w, marks=pytest.mark.exhaustive) for w in ("killed", "asked"))],
)
def test_a_rank_that_ends_while_it_saves(saved: Any, way: str, tmp_path: Path, crews: Any) -> None:
    """Killed, hanging, or asked to end: no rank waits for ever, nothing is half there, "auto" goes on to the end."""
    act, rank, options, match, step = WAYS[way]
    with pytest.raises(AssertionError, match=f"(?s){match}"):
        each_rank(2, partial(save_with, tmp_path, act, rank, **options))
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest[0].name == f"step-{step:08d}"
    assert not newest[2]
    if step == 4:  # Else it was saved in a second call of run, which `train` does not make.
        for own, _, steps in crews(2).call(partial(train, 2, tmp_path, resume="auto")):
            assert steps == STEPS
            assert bitwise(own, saved[1][0][0])
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".staging")]


# ------------------------------------------------------------------------------------- commands, and what is refused


def test_doctor_and_consolidate(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both need no ranks; the weights are those that the model has."""
    path = saved[0]
    assert main(["doctor", str(path.parent)]) == 0
    assert "step-00000004" in capsys.readouterr().out
    for name in (path, path.parent):
        assert main(["consolidate", str(name), str(tmp_path / "plain.safetensors")]) == 0
        plain = load_weights(tmp_path / "plain.safetensors")
        single = trainer(tmp_path / "run", reshard=True)
        single.load_state(path)
        assert bitwise(plain, weights(single))
        assert bitwise(plain, load_weights(path))
    assert main(["consolidate", str(path), str(tmp_path / "plain.zip")]) == 2
    assert main(["consolidate", str(tmp_path / "absent"), str(tmp_path / "plain.pt")]) == 2
    damaged = shutil.copytree(path, tmp_path / "damaged" / path.name)
    (damaged / "shard-00001.safetensors").unlink()
    assert main(["consolidate", str(damaged), str(tmp_path / "plain.pt")]) == 1
    assert "shard-00001.safetensors: is missing" in capsys.readouterr().err
    assert not (tmp_path / "plain.pt").exists()
    assert main(["doctor", str(damaged.parent)]) == 1


def save_often(folder: Path) -> None:
    made = trainer(folder, save_every=3, keep_best=0)
    made.run(1, data(ROWS, BATCH // 2))
    made.barrier()


def test_old_checkpoints_are_removed_with_their_shards(tmp_path: Path, crews: Any) -> None:
    """keep_last=1 leaves one folder, and nothing of the others."""
    crews(2).call(save_often, tmp_path)
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["step-00000007"]
    assert verify(tmp_path / "step-00000007")["world_size"] == 2


def save_tied(folder: Path) -> None:
    model = net()
    model.head.weight = model.embed.weight
    build(ENGINES["fsdp"], StateManagerAddon, model=model, save_path=folder, save_format="sharded").run(1, data(8))


def test_tied_weights_in_shards_are_read_by_one_process(tmp_path: Path, crews: Any) -> None:
    """A file of shards has both names of a parameter."""
    crews(2).call(save_tied, tmp_path)
    model = net()
    model.head.weight = model.embed.weight
    trainer = build(ENGINES["fsdp"], StateManagerAddon, model=model, save_path=tmp_path, resume="auto", reshard=True)
    trainer.run(1, data(8, 8))
    assert trainer.progress_checker.step == 1
    assert model.head.weight is model.embed.weight
