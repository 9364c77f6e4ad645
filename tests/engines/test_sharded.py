"""Sharded checkpoints: every rank writes its parts, any number of ranks reads them, and a part of one never stands."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.engines import ENGINES, build, data, distance, weights
from kit.faults import Disk, KillingDisk, RefusingDisk, installed
from kit.ranks import each_rank
from zae.__main__ import main
from zae.addons import EMAAddon, StateManagerAddon
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, ConfigError, NonFiniteError
from zae.storage.checkpoint import load_checkpoint, load_weights, newest_valid
from zae.storage.manifest import parse, read_manifest, seal, verify
from zae.storage.names import SHARDS

LIMIT = 1e-12
FSDP = ENGINES["fsdp"]
ROWS, BATCH, STEPS = 84, 12, 14


def trainer(path: Path, *add_ons: Any, **options: Any) -> Any:
    given = {"save_format": "sharded", "gradient_clip": 0.05, "decay": 0.9, "keep_last": 1, **options}
    given["scheduler"] = scheduler
    return build(FSDP, StateManagerAddon, EMAAddon, *add_ons, save_path=path, **given)


def scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)


def train(
    world: int,
    path: Path,
    start: Path | None = None,
    max_steps: int | None = None,
    shuffle: bool = False,
    **options: Any,
) -> Any:
    """Train with so many ranks, all with the same global batch, and return the end of it."""
    assert (dist.get_world_size() if dist.is_initialized() else 1) == world
    resumed = {} if start is None else {"resume": str(start), "reshard": True}
    made = trainer(path, **{**resumed, **options})
    made.run(2, data(ROWS, BATCH // world, shuffle), **({} if max_steps is None else {"max_steps": max_steps}))
    average = {f"average.{name}": made.whole(value).clone() for name, value in made.average.items()}
    return weights(made) | average, made.train_history, made.progress_checker.step


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if not name.endswith("key.bias"))


def bitwise(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks stop at step 4 of 7 of the first epoch; they, and one process, also go to the end."""
    folder = tmp_path_factory.mktemp("sharded")
    each_rank(2, train, 2, folder / "half", None, 4)
    whole = each_rank(2, train, 2, folder / "end")
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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_two_ranks_are_resumed_by_any_number(saved: Any, world: int, tmp_path: Path) -> None:
    """In the middle of an epoch: bitwise with as many, and to 1e-12 with others; one needs no process group."""
    path, two, single = saved
    ends = [train(1, tmp_path, path)] if world == 1 else each_rank(world, train, world, tmp_path, path)
    for end, history, step in ends:
        assert step == STEPS == single[2]
        for row, expected in zip(history, single[1], strict=True):
            assert row == pytest.approx(expected, rel=1e-12)
        if world == 2:
            assert bitwise(end, two[0][0])
        assert far(end, single[0]) < LIMIT


def test_one_process_is_resumed_by_two(saved: Any, tmp_path: Path) -> None:
    """And these by three, from what they have saved in shards."""
    train(1, tmp_path / "one", None, 3)
    each_rank(2, train, 2, tmp_path / "two", tmp_path / "one" / "step-00000003", 9)
    for end, _, step in each_rank(3, train, 3, tmp_path / "three", tmp_path / "two" / "step-00000009"):
        assert step == STEPS
        assert far(end, saved[2][0]) < LIMIT


def test_whole_checkpoints_and_shards_load_into_each_other(saved: Any, tmp_path: Path) -> None:
    """Of FSDP and DDP, with as many ranks."""

    def cross() -> None:
        def run(engine: str, kind: str, start: Path | None = None, max_steps: int | None = None) -> Any:
            name = str(next(count))
            options = {"gradient_clip": 0.05, "save_format": kind, "resume": False if start is None else str(start)}
            made = build(ENGINES[engine], StateManagerAddon, save_path=tmp_path / name, **options)
            limits = {"max_steps": max_steps} if max_steps else {}
            made.run(2, data(ROWS, BATCH // 2, False), **limits)
            return made, tmp_path / name / f"step-{made.progress_checker.step:08d}"

        count = itertools.count()
        end = run("fsdp", "safetensors")[0]
        for source, target in (("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp")):
            for kind, other in (("safetensors", "sharded"), ("sharded", "safetensors")):
                path = run(source, kind, max_steps=4)[1]
                is_sharded = source == "fsdp" and kind == "sharded"
                assert (read_manifest(path)["model_format"] == "sharded") == is_sharded
                assert distance(run(target, other, path)[0], end) < LIMIT

    each_rank(2, cross)


def test_another_number_of_ranks_is_refused_without_reshard(saved: Any, tmp_path: Path) -> None:
    """The error names both numbers."""
    with pytest.raises(CheckpointMismatch, match="was saved by 2 processes; this run has 1"):
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


# ------------------------------------------------------------------------------------------------------- failure


def begun(path: Path, shuffle: bool = False) -> tuple[Any, Any]:
    """Return a trainer that has saved step 4, and what it trains on."""
    made, loader = trainer(path, on_save_error="raise"), data(ROWS, BATCH // 2, shuffle)
    made.run(2, loader, max_steps=4)
    return made, loader


def test_a_disk_that_refuses_is_reported_by_all_ranks(tmp_path: Path) -> None:
    """Whichever operation of whichever rank it is: the old checkpoint stands, nothing is left, the next save works."""

    def refuse() -> int:
        made, _ = begun(tmp_path / "run")
        rank, target, failed = dist.get_rank(), tmp_path / "step-00000004", 0
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
                        assert {each.name for each in tmp_path.iterdir()} == {"run", target.name}
                        made.barrier()
                    if made.gather(len(disk.log))[victim] <= at:  # It was not reached.
                        break
        return failed

    failed = each_rank(2, refuse)
    assert failed[0] == failed[1] > 9


def test_a_rank_that_raises_anything_ends_the_save_of_all(tmp_path: Path) -> None:
    """Weights that are not finite on one rank alone too."""

    def fail() -> None:
        made, _ = begun(tmp_path)
        with made.ready():
            with torch.no_grad():
                if dist.get_rank():
                    made.unwrap().head.weight.to_local().fill_(math.nan)
            with pytest.raises(NonFiniteError, match=r"head\.weight contains NaN"):
                made.save_state(tmp_path / "other")
            assert not (tmp_path / "other").exists()
            made.barrier()

    each_rank(2, fail)


def save_killed(path: Path, victim: int, at: int) -> list[str]:
    made, loader = begun(path, shuffle=True)
    disk = KillingDisk(at) if dist.get_rank() == victim else Disk()
    with installed(disk):
        made.run(2, loader, max_steps=2)
    return [name for name, _ in disk.log]


def test_a_rank_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """The previous checkpoint is the newest, or the new one is whole; resume="auto" goes on to the same end."""
    names = each_rank(2, save_killed, tmp_path / "alive", 0, 1 << 20)
    end = each_rank(2, partial(train, 2, tmp_path / "end", shuffle=True))[0][0]
    renames = [index for index, name in enumerate(names[0]) if name == "rename"]
    places = [(0, renames[-2]), (0, renames[-1]), *((1, at) for at in range(len(names[1])))]
    for victim, at in places:
        path = tmp_path / f"{victim}-{at}"
        with pytest.raises(AssertionError, match=f"rank {victim} of 2: ended with -9"):
            each_rank(2, save_killed, path, victim, at)
        found = newest_valid(path)
        assert found is not None
        assert not found[2]
        is_whole = (victim, at) == places[1]  # Killed while it removed what the new one replaces.
        assert found[0].name == ("step-00000006" if is_whole else "step-00000004")
    for victim, at in (places[0], places[-1]):
        path = tmp_path / f"{victim}-{at}"
        for own, _, step in each_rank(2, partial(train, 2, path, resume="auto", shuffle=True)):
            assert step == STEPS
            assert bitwise(own, end)
        assert not [each for each in path.iterdir() if each.name.startswith(".staging")]


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


def test_an_asynchronous_save_is_refused(tmp_path: Path) -> None:
    """By name, with the remedy."""
    with pytest.raises(ConfigError, match="leave save_async out"):
        trainer(tmp_path, save_async=True)


def test_old_checkpoints_are_removed_with_their_shards(tmp_path: Path) -> None:
    """keep_last=1 leaves one folder, and nothing of the others."""

    def run() -> None:
        made = trainer(tmp_path, save_every=3, keep_best=0)
        made.run(1, data(ROWS, BATCH // 2))
        made.barrier()
        assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["step-00000007"]
        verify(tmp_path / "step-00000007")

    each_rank(2, run)
