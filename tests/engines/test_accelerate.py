"""AccelerateAddon: the loop of Accelerate and MultiGPUAddon to the last bit, its folders, launchers, and refusals."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from torch import nn

from kit.accelerators import fresh_state
from kit.engines import Engine, Task, adamw, build, data, distance, net, sgd, weights
from kit.rank_tasks import forks
from kit.scripts import Torchrun
from zae import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, ConfigError
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    CompileAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    StateManagerAddon,
)

LIMIT = 1e-12
ACCELERATE, DDP = Engine((AccelerateAddon,)), Engine((MultiGPUAddon,))
F32 = torch.float32


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget the Accelerators of other tests, and this one's."""
    with fresh_state():
        yield
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # A plugin sets it.


def make(engine: Engine | None, *add_ons: Any, **options: Any) -> Any:
    return build(engine, *add_ons, **options)


def bitwise(one: Any, other: Any) -> bool:
    here, there = weights(one), weights(other)
    return here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


# ----------------------------------------------------------------------------------------------- on several ranks


class Looks(Task):
    """Note what the Accelerator says in each step, and print with it."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.looks: list[Any] = []

    def train_step(self, batch: Any) -> Any:
        own = self.accelerator
        if self.mode == "train":
            self.looks.append((own.distributed_type.name, own.num_processes, own.process_index, own.sync_gradients))
        assert own.is_main_process == self.is_main
        return super().train_step(batch)


def on_two(rows: int) -> None:
    """Equal to MultiGPUAddon to the last bit, and to one process but for rounding."""
    options = {"gradient_clip": 0.05, "gradient_accumulation_steps": 2}
    trainer = make(ACCELERATE, GradientAccumulationAddon, task=Looks, **options)
    ddp, single = (make(each, GradientAccumulationAddon, **options) for each in (DDP, None))
    ends = [each.run(2, data(rows), data(9, 2, False)) for each in (trainer, ddp)]
    ends.append(single.run(2, data(rows, 8), data(9, 2, False)))
    assert len({end["step"] for end in ends}) == 1
    assert bitwise(trainer, ddp)
    assert distance(trainer, single) < LIMIT
    assert abs(float(trainer.grad_norm) - float(single.grad_norm)) < LIMIT
    assert float(single.grad_norm) > 0.05
    assert ends[0]["valid_metrics_history"] == ends[1]["valid_metrics_history"]
    flags = [False, True, False, True, True][: 5 if rows == 37 or trainer.rank == 0 else 4] * 2
    assert trainer.looks == [("MULTI_CPU", 2, trainer.rank, flag) for flag in flags]
    assert trainer.accelerator.distributed_type.name == "MULTI_CPU"
    assert dist.get_world_size() == trainer.world_size == trainer.accelerator.num_processes == 2


@pytest.mark.parametrize("rows", [37, pytest.param(33, marks=pytest.mark.exhaustive)])
def test_two_ranks_are_those_of_ddp(rows: int, crews: Any) -> None:
    """AdamW, a clip that bites, windows of two, and shares that are not equal."""
    crews(2).call(on_two, rows)


def by_hand(accelerator: Any, model: nn.Module, loader: Any, epochs: int = 2) -> nn.Module:
    """Train as the documentation of Accelerate does."""
    optimizer = adamw(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for (tokens,) in loader:
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return model


def hand_on_two() -> None:
    """The ranks have other halves of each step there: equal but for rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = by_hand(accelerate.Accelerator(cpu=True), net(), data(32, 4, False))
    assert type(expected).__name__ == "DistributedDataParallel"
    trainer, other = make(ACCELERATE, gradient_clip=0.05), make(None)
    trainer.run(2, data(32, 4, False))
    assert trainer.accelerator.num_processes == 2
    other.apply_weights(expected.module.state_dict())
    assert distance(trainer, other) < LIMIT


@pytest.mark.exhaustive
def test_two_ranks_are_those_of_a_loop_by_hand(crews: Any) -> None:
    crews(2).call(hand_on_two)


def with_handlers() -> None:
    """The option of DistributedDataParallel that zae has too is taken; a given Accelerator is used."""
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    plain = make(DDP, optimizer=sgd)
    trainer = make(ACCELERATE, optimizer=sgd, accelerator_args={"kwargs_handlers": [unused]})
    for each in (plain, trainer):
        each.run(1, data(16))
    assert trainer.find_unused_parameters
    assert bitwise(plain, trainer)
    given = make(ACCELERATE, optimizer=sgd, accelerator=trainer.accelerator, device="cpu")
    given.run(1, data(16))
    assert bitwise(given, plain)
    alone = accelerate.Accelerator(cpu=True)
    alone.state.num_processes = 1
    with pytest.raises(ConfigError, match=r"process \d of 1, and the trainer rank \d of 2; on CPUs write"):
        make(ACCELERATE, accelerator=alone, device="cpu").run(1, data(16))
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.exhaustive
def test_what_handlers_say_is_done_and_a_given_accelerator_is_used(crews: Any) -> None:
    crews(2).call(with_handlers)


SCRIPT = """
    import os, signal, sys, torch
    from accelerate import Accelerator
    sys.path.insert(0, {tests!r})
    from kit.engines import Engine, Task, build, data
    from zae.addons import AccelerateAddon, GradientAccumulationAddon, StateManagerAddon

    class Dies(Task):
        def train_step(self, batch):
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            if kills and first and self.rank == 1 and self.progress_checker.step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(batch)

    if __name__ == "__main__":
        name, kills, is_given = sys.argv[1], sys.argv[2] == "kills", sys.argv[3] == "given"
        options = {{"accelerator": Accelerator(cpu=True)}} if is_given else {{}}
        trainer = build(Engine((AccelerateAddon,)), GradientAccumulationAddon, StateManagerAddon, task=Dies,
                        gradient_accumulation_steps=2, gradient_clip=0.05, save_path=name, save_every=3, resume="auto",
                        timeout=60.0, **options)
        trainer.run(2, data(37), data(9, 2, False))
        assert trainer.accelerator.num_processes == trainer.world_size
        trainer.accelerator.print("world", trainer.world_size, trainer.accelerator.distributed_type.name,
                                  trainer.accelerator.mixed_precision)
        if trainer.is_main:
            torch.save(dict(trainer.unwrap().state_dict()), name + ".pt")
"""


def write_script() -> None:
    Path("train.py").write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).resolve().parents[1])))


def assert_same_files(*names: str) -> None:
    first, *others = (torch.load(f"{name}.pt", weights_only=True) for name in names)
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())


@pytest.mark.exhaustive
def test_torchrun_a_rank_that_is_killed_goes_on_bitwise() -> None:
    """SIGKILL of rank 1 within the second epoch; torchrun starts both again, and resume="auto" goes on."""
    write_script()
    alone = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", "alone"]  # As --standalone.
    for name, kills in (("whole", "stays"), ("killed", "kills")):
        agent = Torchrun(*alone, "--nproc_per_node", 2, "--max-restarts", 1, "train.py", name, kills, "made")
        status, out, err = agent.end()
        assert status == 0, err
        assert "world 2 MULTI_CPU" in out
    assert_same_files("whole", "killed")


@pytest.mark.exhaustive
def test_accelerate_launch_starts_two_processes() -> None:
    """--multi_gpu is its way to torchrun, on CPUs as well; --cpu alone starts one process, whatever --num_processes."""
    write_script()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no",
               "--dynamo_backend", "no", "--num_processes", "2"]  # fmt: skip
    two = ["--multi_gpu", "--main_process_port", "0"]
    for name, options, kind, expected in (
        ("made", two, "made", "world 2 MULTI_CPU"),
        ("given", two, "given", "world 2 MULTI_CPU"),
        ("one", ["--cpu"], "given", "world 1 NO"),
    ):
        line = [*command, *options, "train.py", name, "stays", kind]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert_same_files("made", "given")


FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
machine_rank: 0
num_processes: 2
main_process_port: 0
mixed_precision: '{precision}'
use_cpu: false
"""


@pytest.mark.exhaustive
def test_accelerate_launch_with_a_file() -> None:
    """Its processes and its precision are used."""
    write_script()
    for name, precision in (("plain", "no"), ("bf16", "bf16")):
        Path(f"{name}.yaml").write_text(FILE.format(precision=precision))
        line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"{name}.yaml", "train.py", name]
        done = subprocess.run([*line, "stays", "made"], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert f"world 2 MULTI_CPU {precision}\n" in done.stdout


@pytest.mark.exhaustive
def test_ranks_that_run_starts_leave_the_result_here(tmp_path: Path) -> None:
    trainer = make(ACCELERATE, device=["cpu", "cpu"], task=Looks, timeout=30)
    single = make(None)
    with forks():
        trainer.run(2, data(37))
    single.run(2, data(37, 8))
    assert distance(trainer, single) < LIMIT
    assert trainer.accelerator is None
    assert trainer.evaluate(data(9, 2, False)) == pytest.approx(single.evaluate(data(9, 2, False)), rel=1e-12)
    assert trainer.accelerator.num_processes == 1
    assert trainer.save_accelerate_state(tmp_path / "folder").is_dir()


# ------------------------------------------------------------------------------------------------- in one process


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.exhaustive), "bf16"])
def test_one_process_is_a_loop_by_hand(precision: str) -> None:
    """Bitwise, with evaluation in the same precision; the model is as it was afterwards."""
    expected = by_hand(accelerate.Accelerator(cpu=True, mixed_precision=precision), net(F32), data(32))
    before = set(vars(net(F32)))
    trainer = make(ACCELERATE, model=net(F32), gradient_clip=0.05, accelerator_args={"mixed_precision": precision})
    loader = data(32)
    trainer.run(1, loader)
    trainer.evaluate(data(5, 2, False))
    trainer.run(1, loader)
    pairs = zip(trainer.unwrap().parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert set(vars(trainer.unwrap())) == before
    with trainer.ready():
        assert trainer.accelerator.unwrap_model(trainer.model) is trainer.unwrap()
    accelerator = trainer.accelerator
    assert [accelerator._models, accelerator._optimizers, accelerator._schedulers] == [[], [], []]
    plain = make(None, model=net(F32))
    plain.unwrap().load_state_dict(trainer.unwrap().state_dict())
    here, there = (each.evaluate(data(9, 2, False))["loss"] for each in (trainer, plain))
    assert (here == there) == (precision == "no")


def test_windows_and_a_tracker(tmp_path: Path) -> None:
    """sync_gradients is that of the window in one process too; what the Accelerator logs is written."""

    class Logs(Looks):
        def on_run_begin(self) -> None:
            super().on_run_begin()
            self.accelerator.init_trackers("run", config={"rate": 0.1})

        def log(self, metrics: Any, step: int) -> None:
            super().log(metrics, step)
            self.accelerator.log(dict(metrics), step=step)

        def on_run_end(self) -> None:
            super().on_run_end()
            self.accelerator.end_training()

    own = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    trainer = make(ACCELERATE, GradientAccumulationAddon, task=Logs, accelerator=own, gradient_accumulation_steps=2)
    assert trainer.device.type == "cpu"
    trainer.run(1, data(20))
    assert [flag for *_, flag in trainer.looks] == [False, True, False, True, True]
    assert len(list(tmp_path.rglob("events.*"))) >= 1
    assert trainer.accelerator is own


def test_two_precisions_in_one_process_and_amp() -> None:
    """One trainer after another has its own; AMPAddon has the loss scale of float16, and bfloat16 beside "no"."""
    for precision in ("bf16", "no", "bf16"):
        trainer = make(ACCELERATE, model=net(F32), accelerator_args={"mixed_precision": precision})
        trainer.run(1, data(8))
        assert trainer.accelerator.mixed_precision == precision
        assert trainer.precision_part.name == ("fp32" if precision == "no" else precision)
    amp = make(ACCELERATE, AMPAddon, model=net(F32), precision="bf16")
    plain = make(None, AMPAddon, model=net(F32), precision="bf16")
    for each in (amp, plain):
        each.run(1, data(32))
    assert bitwise(amp, plain)


# ------------------------------------------------------------------------------------------------------ its folders


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Count:
    """An object that is registered for checkpointing."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def trained(**options: Any) -> Any:
    model = net(F32)
    model.head.weight = model.embed.weight  # Tied: safetensors has it once.
    trainer = make(ACCELERATE, model=model, scheduler=schedule, **options)
    trainer.run(2, data(16))
    return trainer


def test_a_folder_goes_to_a_loop_by_hand_and_back(tmp_path: Path) -> None:
    """Weights, states, rates and random streams, with what was registered; a second save replaces the first."""
    trainer = trained()
    trainer.accelerator.register_for_checkpointing(Count(7))
    folder = trainer.save_accelerate_state(tmp_path / "there" / "folder")
    torch.rand(3)
    assert trainer.save_accelerate_state(folder) == folder
    expected = torch.rand(3)
    assert [each.name for each in folder.parent.iterdir()] == ["folder"]
    accelerator = accelerate.Accelerator(cpu=True)
    model = net(F32)
    model.head.weight = model.embed.weight
    optimizer = adamw(model.parameters())
    model, optimizer, rates = accelerator.prepare(model, optimizer, schedule(optimizer))
    accelerator.register_for_checkpointing(count := Count())
    accelerator.load_state(str(folder))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in trainer.unwrap().state_dict().items())
    state = optimizer.state_dict()
    own = trainer.engine.optimizer_state(trainer.optimizers["0"])["state"]
    assert all(torch.equal(own[i][key], each) for i, slots in state["state"].items() for key, each in slots.items())
    assert rates.scheduler.last_epoch == 2
    assert (count.count, torch.rand(3).tolist()) == (7, expected.tolist())
    accelerator.save_state(str(tmp_path / "by hand"))
    accelerator.free_memory()
    model = net(F32)
    model.head.weight = model.embed.weight
    again = make(ACCELERATE, model=model, scheduler=schedule, accelerator=accelerator)
    again.load_accelerate_state(tmp_path / "by hand")
    assert distance(again, trainer, without="none") == 0
    own, found = (each.engine.optimizer_state(each.optimizers["0"]) for each in (trainer, again))
    assert all(
        torch.equal(found["state"][i][key], value) for i in own["state"] for key, value in own["state"][i].items()
    )
    assert found["param_groups"][0]["lr"] == own["param_groups"][0]["lr"] == pytest.approx(1e-2 * 0.81)
    assert again.progress_checker.step == 0
    ends = []
    for each in (trainer, again):
        torch.manual_seed(5)
        each.run(1, data(16))
        ends.append(each)
    assert distance(*ends, without="none") == 0


class Bomb:
    """What pickle would run."""

    def __reduce__(self) -> Any:
        return (Path("exploded").touch, ())


def test_what_a_folder_may_not_be(tmp_path: Path) -> None:
    """Missing, damaged, hostile, of another model or optimizer: refused, and nothing of it is loaded."""
    trainer = trained()
    folder = trainer.save_accelerate_state(tmp_path / "folder")
    before = weights(trainer)
    files = {each.name: each.read_bytes() for each in folder.iterdir()}

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        for name, content in {**files, **{key.replace("__", "."): each for key, each in changed.items()}}.items():
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content)
        torch.manual_seed(1)
        stream = torch.random.get_rng_state()
        with pytest.raises(error, match=match):
            trainer.load_accelerate_state(folder)
        assert torch.equal(stream, torch.random.get_rng_state())
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())

    def saved(value: Any) -> bytes:
        torch.save(value, tmp_path / "value.pt")
        return (tmp_path / "value.pt").read_bytes()

    for name in ("optimizer__bin", "scheduler__bin", "random_states_0__pkl"):
        refused(CheckpointDamaged, "contains objects that only pickle could make", **{name: saved({"state": Bomb()})})
        refused(CheckpointDamaged, "was not read|cannot be read", **{name: pickle.dumps(Bomb())})
        refused(CheckpointDamaged, "was not read|cannot be read", **{name: files[name.replace("__", ".")][:100]})
    assert not Path("exploded").exists()
    refused(CheckpointDamaged, "cannot be read", model__safetensors=files["model.safetensors"][:-9])
    refused(CheckpointNotFound, "has no model.safetensors", model__safetensors=None)
    refused(CheckpointMismatch, r"has no optimizer.bin, and the trainer has 1 optimizer;", optimizer__bin=None)
    more = {"optimizer_1__bin": files["optimizer.bin"]}
    refused(CheckpointMismatch, r"has optimizer_1.bin too, and the trainer has 1 optimizer;", **more)
    (folder / "optimizer_1.bin").unlink()
    refused(CheckpointMismatch, "custom objects, and 0 are registered", custom_checkpoint_0__pkl=saved({"count": 1}))
    (folder / "custom_checkpoint_0.pkl").unlink()
    state = torch.load(folder / "scheduler.bin", weights_only=True)
    refused(CheckpointMismatch, "once for each process", scheduler__bin=saved({**state, "last_epoch": 99}))
    refused(CheckpointMismatch, "shape|size", model__safetensors=other_model(tmp_path))
    with pytest.raises(CheckpointNotFound, match="no folder"):
        trainer.load_accelerate_state(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"parts has 'modle'.*did you mean 'model'"):
        trainer.load_accelerate_state(folder, parts=("modle",))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"contains 'notes.txt', which Accelerate has not written"):
        trainer.save_accelerate_state(folder)
    with pytest.raises(CheckpointError, match="is a file"):
        trainer.save_accelerate_state(folder / "notes.txt")
    assert (folder / "notes.txt").read_text() == "mine"
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def other_model(tmp_path: Path) -> bytes:
    from safetensors.torch import save_file

    found = {name: value.clone() for name, value in net(F32).state_dict().items()}
    save_file({**found, "norm.weight": torch.ones(3)}, tmp_path / "other.safetensors")
    return (tmp_path / "other.safetensors").read_bytes()


def on_ranks(folder: Path) -> list[float]:
    """Save, go on, load what was saved, and go on again."""
    trainer = trained(optimizer=sgd)
    trainer.save_accelerate_state(folder)
    trainer.barrier()
    ends = []
    for _ in range(2):
        trainer.load_accelerate_state(folder)
        with trainer.ready():  # In it each rank draws from its own streams; between two runs, from those of rank 0.
            drawn = float(torch.rand(()))
        trainer.run(1, data(16, 4, False))
        ends.append((drawn, {name: value.clone() for name, value in weights(trainer).items()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(value, ends[1][1][name]) for name, value in ends[0][1].items())
    return trainer.gather(ends[0][0])


@pytest.mark.exhaustive
def test_a_folder_of_two_ranks(tmp_path: Path, crews: Any) -> None:
    """Each has its random streams there; one process takes the weights and states."""
    drawn = crews(2).call(on_ranks, tmp_path / "folder")
    assert len(set(drawn[0])) == 2
    names = {each.name for each in (tmp_path / "folder").iterdir()}
    assert names >= {"random_states_0.pkl", "random_states_1.pkl", "optimizer.bin", "model.safetensors"}
    single = trained(optimizer=sgd)
    single.load_accelerate_state(tmp_path / "folder")


# ------------------------------------------------------------------------------------------------ what is refused


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the trainer is made, or before its first batch, with what to write instead."""

    def refused(match: str, *add_ons: Any, error: type[Exception] = ConfigError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            make(ACCELERATE, *add_ons, **options)

    def args(**options: Any) -> dict[str, Any]:
        return {"accelerator_args": options}

    refused("must be a dict", accelerator_args=3)
    refused(
        "'mixed_precison', which Accelerator does not take.*did you mean 'mixed_precision'", **args(mixed_precison="no")
    )
    refused("accelerator is a str", accelerator="cpu", device="cpu")
    refused("both given", accelerator=accelerate.Accelerator(cpu=True), **args())
    window = "GradientAccumulationAddon.*gradient_accumulation_steps=4"
    refused(window, GradientAccumulationAddon, gradient_accumulation_steps=4, **args(gradient_accumulation_steps=4))
    with pytest.raises(ConfigError, match=window):
        make(ACCELERATE, **args(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))).run(1, data(8))
    refused(r"Write mixed_precision='no' there, and .*AMPAddon\), precision='fp16'", **args(mixed_precision="fp16"))
    refused("without AMPAddon 'bf16'", AMPAddon, precision="bf16", **args(mixed_precision="bf16"))
    refused(r"Task.add_on\(AccelerateAddon, CompileAddon\)", **args(dynamo_backend="inductor"))
    refused("divide the batch_size of the loader", **args(split_batches=True))
    with pytest.raises(ConfigError, match="let each rank read its own share"):
        make(ACCELERATE, **args(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))).run(1, data(8))
    refused("has dispatch_batches=True.*let each rank read its own share", **args(dispatch_batches=True))
    refused("timeout=... and backend=...", **args(kwargs_handlers=[InitProcessGroupKwargs()]))
    refused("train with DeepSpeedAddon", **args(deepspeed_plugin=object()))
    refused("train with FSDPAddon", **args(fsdp_plugin=object()))
    refused("mesh={'shard': 2, 'tensor': 2}", **args(parallelism_config=object()))
    for given in ({"comm_hook": DDPCommunicationHookType.FP16}, {"comm_hook": "fp16"}, {"static_graph": True}):
        refused("does not use; leave it out", **args(kwargs_handlers=[DistributedDataParallelKwargs(**given)]))
    kept = DistributedDataParallelKwargs(broadcast_buffers=False)
    refused("broadcast_buffers=False", **args(kwargs_handlers=[kept]))
    own = accelerate.Accelerator(cpu=True)
    refused("Write accelerator_args=.*or start the script with torchrun", accelerator=own, device=["cpu", "cpu"])
    refused("Accelerate refuses|fill the slot 'parallel'", MultiGPUAddon, error=Exception)
    plain = net()
    model, optimizer, loader = own.prepare(net(), sgd(plain.parameters()), data(8))
    with pytest.raises(ConfigError, match="was prepared by an Accelerator already; give the trainer the model itself"):
        make(ACCELERATE, model=model).run(1, data(8))
    refused("give the trainer the one inside", optimizer=optimizer, model=plain)
    with pytest.raises(ConfigError, match="give run the DataLoader itself"):
        make(ACCELERATE).run(1, loader)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for version in ("1", "2"):  # Its plugin of the first one fails without a GPU.
        monkeypatch.setenv("FSDP_VERSION", version)
        with pytest.raises(ConfigError, match="also of the configuration of accelerate launch, and train with FSDPA"):
            make(ACCELERATE).run(1, data(8))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    refused(window.replace("4", "3"), accelerator=own)


def test_arguments_that_change_nothing_here_are_taken(tmp_path: Path) -> None:
    """What they ask for is what a trainer does; the others of this list are those that the script reads itself."""
    single = make(None)
    single.run(1, data(8))
    loaders = DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True, use_stateful_dataloader=False)
    for options in (
        {"dataloader_config": loaders},
        {"step_scheduler_with_optimizer": False, "split_batches": False, "gradient_accumulation_steps": 1},
        {"project_dir": str(tmp_path), "project_config": ProjectConfiguration(automatic_checkpoint_naming=True)},
        {"kwargs_handlers": [GradScalerKwargs(), ProfileKwargs(), AutocastKwargs()], "dynamo_backend": "no"},
    ):
        trainer = make(ACCELERATE, accelerator_args=options)
        trainer.run(1, data(8))
        assert bitwise(trainer, single)


@pytest.mark.exhaustive
def test_compiled_and_saved_in_every_engine(tmp_path: Path) -> None:
    """CompileAddon works beside it; a checkpoint of StateManagerAddon goes to DDP and to one process."""
    options: dict[str, Any] = {"compile_backend": "eager", "model": net(F32)}
    trainer = make(ACCELERATE, CompileAddon, StateManagerAddon, save_path=tmp_path / "own", **options)
    trainer.run(1, data(16))
    single = make(None, model=net(F32))
    single.run(1, data(16))
    assert bitwise(trainer, single)
    other = make(DDP, CompileAddon, StateManagerAddon, save_path=tmp_path / "other", resume=str(tmp_path / "own"),
                 **{**options, "model": net(F32)})  # fmt: skip
    other.run(2, data(16))
    assert other.progress_checker.step == 2 * trainer.progress_checker.step
