"""DeepSpeedAddon: equal to one process, its state whole in every checkpoint, and what it refuses.

What trains with DeepSpeed has the marker `deepspeed`, and needs the extra of this name; what is refused before it is
imported runs by default.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kit.engines import Counted, Engine, Net, Task, build, data, distance, net, weights
from kit.loggers import scalars
from kit.scripts import Torchrun
from zae import CheckpointMismatch, ConfigError, DistributedError, Trainer
from zae.addons import (
    CallbackAddon,
    DeepSpeedAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MLflowLoggerAddon,
    MultiGPUAddon,
    PEFTAddon,
    PrefetchAddon,
    SpikeGuardAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
)
from zae.addons.deepspeed.config import ELEMENTWISE
from zae.addons.deepspeed.zero import load_library

LIMIT = 1e-6
F32 = torch.float32
# DeepSpeed keeps parameters of fewer elements whole, which all of this model are.
CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose first steps are not those of the rounding of gradients near zero."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def engine(stage: int, **options: Any) -> Engine:
    return Engine((DeepSpeedAddon,), options={"zero_stage": stage, "deepspeed_config": CONFIG, **options})


def make(stage: int | None, *add_ons: Any, **options: Any) -> Any:
    """Return a trainer with DeepSpeed in a stage, or of one process."""
    own = {"model": options.pop("model", None) or net(F32), "optimizer": adamw, **options}
    if stage is None:
        own = {key: value for key, value in own.items() if not key.startswith(("deepspeed", "zero"))}
    return build(None if stage is None else engine(stage), *add_ons, **own)


def import_library() -> None:
    """Import DeepSpeed here, once: the ranks are forks, and each would take 10 s of the processor for it."""
    load_library(torch.device("cpu"))


def on_ranks(*stages: int, world: int = 2) -> Any:
    """Run a test function on ranks, in each of these stages."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def run(stage: int, tmp_path: Path, crews: Any) -> None:
            import_library()
            crews(world).call(on_rank, test.__module__, test.__name__, stage, tmp_path)

        del run.__wrapped__
        run.on_rank = test  # type: ignore[attr-defined]
        return pytest.mark.deepspeed(pytest.mark.parametrize("stage", stages)(run))

    return decorate


def on_rank(module: str, test: str, stage: int, tmp_path: Path) -> None:
    """Call a test function, which the ranks know by its name."""
    function = getattr(sys.modules[module], test).on_rank
    fixtures = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(function).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)  # DeepSpeed's calls.
        function(stage, **fixtures)


def held(trainer: Any) -> int:
    """Return how many elements of the optimizer's state this rank holds."""
    stepped = trainer._zero._stepped
    return sum(each.numel() for slots in stepped.state.values() for key, each in slots.items() if key == "exp_avg")


def train_both(stage: int, *add_ons: Any, steps: int = 10, **options: Any) -> tuple[Any, Any]:
    """Train with DeepSpeed on two ranks and in one process, on the same global batches."""
    trainer, single = (make(each, *add_ons, **options) for each in (stage, None))
    here = trainer.run(2, data(8 * steps), data(9, 2, False))
    there = single.run(2, data(8 * steps, 8), data(9, 2, False))
    assert here["step"] == there["step"]
    for key in ("train_metrics_history", "valid_metrics_history"):
        for row, expected in zip(here[key], there[key], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
    return trainer, single


# --------------------------------------------------------------------------------------------------- exactness


@on_ranks(0, 1, 2, 3)
def test_the_weights_are_those_of_one_process(stage: int) -> None:
    """AdamW with a clip that bites and two batches in a window; targets that are counted; each rank has a part."""
    count = sum(each.numel() for each in net().parameters())
    for task, clip in ((Task, 0.05), (Counted, math.inf)):
        options = {"task": task, "gradient_clip": clip, "gradient_accumulation_steps": 2}
        trainer, single = train_both(stage, GradientAccumulationAddon, steps=20, **options)
        assert trainer.progress_checker.step == 20
        assert float(single.grad_norm) > 0.05
        assert abs(float(trainer.grad_norm) - float(single.grad_norm)) < LIMIT
        assert distance(trainer, single) < LIMIT
        assert dist.get_world_size() == trainer.world_size == 2
        assert held(trainer) == count if stage == 0 else count / 2 <= held(trainer) < 0.6 * count
        if stage == 3:
            parts = [each.ds_tensor.numel() for each in trainer.unwrap().parameters()]
            assert count / 2 <= sum(parts) < 0.6 * count


@on_ranks(0, 1, 2, 3)
def test_other_optimizers(stage: int) -> None:
    """Each that is accepted computes with flat parts what it computes with whole tensors."""
    for kind in ELEMENTWISE:
        options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 1e-3}
        made = functools.partial(kind, eps=1e-4, **options) if kind is not torch.optim.SGD else None
        trainer, single = train_both(stage, optimizer=made or functools.partial(kind, **options), steps=3)
        assert distance(trainer, single) < LIMIT, kind


@on_ranks(1, 2, 3)
def test_tuned_as_a_file_says(stage: int, tmp_path: Path) -> None:
    """Small buckets and groups of parameters, and no reduce_scatter; "auto" is DeepSpeed's own value."""
    tuning = {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "sub_group_size": 400, "overlap_comm": False,
              "reduce_scatter": False, "stage3_prefetch_bucket_size": "auto", "contiguous_gradients": True,
              "stage3_param_persistence_threshold": 100}  # fmt: skip
    given = {"zero_optimization": {"stage": "auto", **tuning}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
             "train_micro_batch_size_per_gpu": 4, "train_batch_size": "auto"}  # fmt: skip
    path = tmp_path / f"ds-{dist.get_rank()}.json"
    path.write_text(json.dumps(given))
    groups = [lambda named: [{"params": [p for n, p in named if ("bias" in n) == flag], "lr": 1e-3 * (1 + flag)}
                             for flag in (False, True)]]  # fmt: skip

    def grouped(named_parameters: Any) -> Any:
        return torch.optim.AdamW(groups[0]([*named_parameters()]))

    trainer, single = train_both(stage, gradient_clip=0.05, deepspeed_config=path, optimizer=grouped)
    assert distance(trainer, single) < LIMIT
    with pytest.raises(ConfigError, match="_per_gpu=4, and the trainer batch_size=2 of the loader"):
        trainer.run(1, data(8, 2))


@on_ranks(1, 2, 3)
def test_bf16_is_near_to_float32(stage: int, tmp_path: Path) -> None:
    """20 steps of at most 1e-3 each; the weights of the optimizer are whole, in float32, and a resume is bitwise."""

    class Floats(Trainer):
        def train_step(self, batch: Any) -> Any:
            (tokens,) = batch
            out = self.model(tokens.float())
            return {"loss": (out - tokens.float().sum(1, keepdim=True) / 10).square().mean()}

        test_step = train_step

    def mlp() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def run(name: str, **options: Any) -> Any:
        path = {"save_path": tmp_path / name, "save_every": 4}
        trainer = make(stage, StateManagerAddon, task=Floats, model=mlp(), deepspeed_bf16=True, **path, **options)
        limits = {"max_steps": 4} if name == "begun" else {}
        trainer.run(2, data(80), **limits)
        return trainer

    single = make(None, task=Floats, model=mlp())
    single.run(2, data(80, 8))
    end, begun = run("end"), run("begun")
    assert end.precision_part.name == "bf16"
    assert next(end.unwrap().parameters()).dtype == torch.bfloat16
    found = weights(end)
    assert {each.dtype for each in found.values()} == {F32}
    assert any(bool((each != each.bfloat16().float()).any()) for each in found.values())
    assert 0 < distance(end, single) < 2e-3
    again = run("again", resume=str(tmp_path / "begun"))
    assert begun.progress_checker.step == 4
    assert again.progress_checker.step == end.progress_checker.step == 20
    assert all(torch.equal(value, found[name]) for name, value in weights(again).items())
    loaded = make(None, task=Floats, model=mlp())
    loaded.apply_weights(found)
    assert distance(loaded, again) == 0
    again.apply_weights(weights(single))
    assert distance(again, single) == 0


@on_ranks(0, 1, 2, 3)
def test_ranks_without_samples(stage: int) -> None:
    """A last window in which a rank has no sample."""
    for task in (Task, Counted):
        for rows in (1, 9):
            trainer, single = (make(each, task=task, gradient_clip=0.05) for each in (stage, None))
            here = trainer.run(2, data(rows), data(1, 1, False))
            there = single.run(2, data(rows, 8), data(1, 1, False))
            assert here["step"] == there["step"] == trainer.progress_checker.batch
            assert distance(trainer, single) < LIMIT


@on_ranks(0, 1, 2, 3)
def test_evaluation_between_runs_and_schedules(stage: int) -> None:
    """Evaluation before, between and after runs; the schedule of the trainer sets the rates; runs go on."""
    trainers = []
    for kind, size in ((stage, 4), (None, 8)):
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        trainer = make(kind, scheduler=schedule)
        before = trainer.evaluate(data(9, 2, False))
        trainer.run(1, data(24, size))
        trainer.toggle()
        trainer.toggle()
        trainer.run(2, data(24, size))
        trainers.append((trainer, before, trainer.evaluate(data(9, 2, False)), trainer.predict(data(9, 2, False))))
    (trainer, *own), (single, *others) = trainers
    assert own[0] == pytest.approx(others[0], rel=1e-5)
    assert own[1] == pytest.approx(others[1], rel=1e-5)
    assert own[2]["rows"].tolist() == others[2]["rows"].tolist()
    assert distance(trainer, single) < LIMIT
    assert trainer.optimizer.param_groups[0]["lr"] == single.optimizer.param_groups[0]["lr"] == 1e-3 / 8


class Skipped(Task):
    """The loss of the last rank is not finite in the second step; in the third one a step is left out by the task."""

    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        batches = self.progress_checker.batch
        is_wrong = batches == 1 and self.rank == self.world_size - 1
        return {"loss": loss * float("nan") if is_wrong else loss}

    def should_step(self, outputs: Any) -> bool:
        return super().should_step(outputs) and self.progress_checker.batch != 2


@on_ranks(0, 1, 2, 3)
def test_steps_that_are_left_out_leave_nothing_behind(stage: int) -> None:
    """The gradients of a skipped step are dropped: what follows is as in one process."""
    for clip in (0.0, 0.05):
        trainer, single = (make(each, task=Skipped, gradient_clip=clip, on_nonfinite="skip") for each in (stage, None))
        trainer.run(1, data(48))
        single.run(1, data(48, 8))
        assert trainer.gather(trainer.progress_checker.skipped_steps) == [2, 2]
        assert single.progress_checker.skipped_steps == 2
        assert distance(trainer, single) < LIMIT


@on_ranks(0, 1, 2, 3)
def test_frozen_and_tied_parameters_and_two_calls_of_the_model(stage: int) -> None:
    class Twice(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": Task.train_step(self, batch)["loss"] + 0.5 * Task.train_step(self, batch)["loss"]}

    trainers = []
    for kind in (stage, None):
        model = net(F32)
        model.head.weight = model.embed.weight
        model.blocks[0].requires_grad_(False)
        trainer = make(kind, model=model, task=Twice)
        trainer.run(2, data(32, 4 if kind is not None else 8))
        trainers.append(trainer)
    frozen = net(F32).state_dict()
    own = weights(trainers[0])
    assert all(torch.equal(value, frozen[name]) for name, value in own.items() if name.startswith("blocks.0"))
    assert distance(*trainers) < LIMIT
    assert torch.equal(own["head.weight"], own["embed.weight"])


# ------------------------------------------------------------------------------------------------------ the state


@on_ranks(0, 1, 2, 3)
def test_whole_states_load_into_every_engine(stage: int, tmp_path: Path) -> None:
    """From DDP, FSDP, one process and another stage to this one, and back; a resume of the same kind is bitwise."""
    other = (stage + 2) % 4
    kinds = {
        "here": engine(stage), "other": engine(other), "ddp": Engine((MultiGPUAddon,)), "fsdp": Engine((FSDPAddon,)),
    }  # fmt: skip

    def run(kind: str, folder: str, **options: Any) -> Any:
        own = {"model": net(F32), "optimizer": adamw, "gradient_clip": 0.05, "save_path": tmp_path / folder}
        trainer = build(kinds[kind], StateManagerAddon, save_every=3, **own, **options)
        trainer.run(3, data(16, 4, False), **({} if "resume" in options else {"max_steps": 3}))
        return trainer

    end = make(stage, gradient_clip=0.05)
    end.run(3, data(16, 4, False))
    for kind in kinds:
        run(kind, kind)
    dist.barrier()
    for saved, loaded in (("here", "here"), ("here", "other"), ("ddp", "here"), ("here", "ddp"), ("here", "fsdp"),
                          ("fsdp", "here")):  # fmt: skip
        trainer = run(loaded, f"{saved}-{loaded}", resume=str(tmp_path / saved), reshard=saved != loaded)
        assert trainer.progress_checker.step == 6
        assert distance(trainer, end) < LIMIT, (saved, loaded)
        if saved == loaded == "here":
            own = weights(trainer)
            assert all(torch.equal(value, own[name]) for name, value in weights(end).items())
            state, expected = (each.engine.optimizer_state(each.optimizers["0"])["state"] for each in (trainer, end))
            assert all(torch.equal(state[i][key], each) for i in state for key, each in expected[i].items())
    with pytest.raises(ConfigError, match="copied or pickled"):
        end.__getstate__()


@on_ranks(0, 1, 2, 3)
def test_weights_alone(stage: int, tmp_path: Path) -> None:
    """save_model writes the plain weights, once; one process and the engine load them, in the middle too."""
    trainer, single, again = make(stage), make(None), make(stage)
    trainer.run(1, data(16))
    trainer.save_model(tmp_path / "model.safetensors")
    trainer.barrier()
    single.apply_weights(tmp_path / "model.safetensors")
    assert distance(trainer, single, without="none") == 0
    again.evaluate(data(4, 2))
    again.apply_weights(tmp_path / "model.safetensors")
    assert distance(trainer, again, without="none") == 0
    assert again.evaluate(data(9, 2)) == pytest.approx(single.evaluate(data(9, 2)), rel=1e-5)
    again.run(1, data(16))
    single.run(1, data(16, 8))
    assert distance(again, single) < LIMIT


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_number_of_ranks(stage: int, tmp_path: Path, crews: Any) -> None:
    """Two ranks save, three resume with reshard=True and save, one resumes; without it the remedy is named."""
    import_library()
    crews(2).call(go_on, stage, tmp_path / "two", None, 2)
    crews(3).call(go_on, stage, tmp_path / "three", tmp_path / "two", 4)
    (found,) = crews(1).call(go_on, None, tmp_path / "one", tmp_path / "three", 6)
    single, saved = make(None), make(None)
    single.run(6, data(12, 12, False))
    saved.apply_weights(found)
    assert distance(saved, single) < LIMIT


def go_on(stage: int | None, folder: Path, source: Path | None, epochs: int) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
        options: dict[str, Any] = {"resume": str(source) if source else False, "save_path": folder, "overwrite": True}
        size = 12 // dist.get_world_size()
        add_ons = (StateManagerAddon,) if stage is not None else (StateManagerAddon, MultiGPUAddon)
        if source and dist.get_world_size() > 1:
            refused = make(stage, *add_ons, **{**options, "save_path": folder.with_name("refused")})
            with pytest.raises(CheckpointMismatch, match="reshard=True"):
                refused.run(epochs, data(12, size, False))
        trainer = make(stage, *add_ons, **options, **({"reshard": True} if source else {}))
        trainer.run(epochs, data(12, size, False))
        assert trainer.progress_checker.step == epochs
        return weights(trainer)


@pytest.mark.deepspeed
def test_ranks_that_run_starts_leave_whole_weights_in_the_caller(tmp_path: Path) -> None:
    """Without a launcher; nothing is compiled, and the model and the optimizer are plain ones again."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
    try:
        trainer = make(3, device=["cpu", "cpu"], deepspeed_config={"zero_optimization": {"stage": 3}})
        single = make(None)
        trainer.run(2, data(16))
        single.run(2, data(16, 8))
    finally:
        del os.environ["TORCH_EXTENSIONS_DIR"]
    assert not (tmp_path / "extensions").exists() or not [*(tmp_path / "extensions").rglob("*")]
    assert distance(trainer, single) < LIMIT
    assert type(trainer.model) is Net
    state, expected = (each.optimizer.state_dict()["state"] for each in (trainer, single))
    for index, slots in expected.items():
        assert float((state[index]["exp_avg"] - slots["exp_avg"]).abs().max()) < LIMIT
    assert trainer.evaluate(data(9, 2)) == pytest.approx(single.evaluate(data(9, 2)), rel=1e-5)
    trainer.run(1, data(16))
    single.run(1, data(16, 8))
    assert distance(trainer, single) < LIMIT


SCRIPT = """
    import argparse, os, signal, sys, torch
    sys.path.insert(0, {tests!r})
    from kit.engines import Engine, Task, data, net
    from zae.addons import DeepSpeedAddon, StateManagerAddon

    class Dies(Task):
        def train_step(self, batch):
            if given.kills and not os.path.exists("killed") and self.rank == 1 and self.progress_checker.step == 3:
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(batch)

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("name")
        parser.add_argument("--kills", action="store_true")
        parser.add_argument("--local_rank", type=int)  # Of the launcher of DeepSpeed.
        given = parser.parse_args()
        torch.manual_seed(0)
        trainer = Dies.add_on(DeepSpeedAddon, StateManagerAddon)(
            net(torch.float32), "cpu", optimizer=lambda each: torch.optim.AdamW(each, lr=1e-3, eps=1e-5), seed=0,
            log_bar=False, zero_stage=2, save_path=given.name, save_every=2, resume="auto", timeout=60.0)
        trainer.run(2, data(16))
        if trainer.is_main:
            print("world", trainer.world_size, "stage", trainer.zero_stage)
        trainer.save_model(given.name + ".pt")
"""


def write_script() -> None:
    Path("train.py").write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).resolve().parents[1])))


@pytest.mark.deepspeed
def test_torchrun_and_the_launcher_of_deepspeed() -> None:
    """The same weights by both, with --local_rank too; torchrun starts the ranks again where one is killed."""
    import_library()
    write_script()
    alone = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", "alone"]  # As --standalone.
    for name, *kills in (("whole",), ("killed", "--kills")):
        agent = Torchrun(*alone, "--nproc_per_node", 2, "--max-restarts", 1, "train.py", name, *kills)
        status, out, err = agent.end(600)
        assert status == 0, err
        assert "world 2 stage 2" in out
    assert Path("killed").exists()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    line = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*line, "train.py", "launched"], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "world 2 stage 2" in done.stdout
    first, *others = (torch.load(f"{name}.pt", weights_only=True) for name in ("whole", "killed", "launched"))
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())


# -------------------------------------------------------------------------------------------- with other add-ons


class Spiky(Task):
    """The loss of one step is far above the others."""

    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        return {"loss": found["loss"] * (1e4 if self.progress_checker.step == 7 else 1.0)}


@on_ranks(0, 1, 2, 3)
def test_a_spike_is_skipped(stage: int) -> None:
    """As in one process, with the parts that each rank has."""
    options = {"spike_warmup": 4, "spike_threshold": 100.0, "task": Spiky, "gradient_clip": 0.5}
    trainer, single = (make(each, SpikeGuardAddon, **options) for each in (stage, None))
    trainer.run(1, data(96))
    single.run(1, data(96, 8))
    assert [each["step"] for each in trainer.spikes] == [each["step"] for each in single.spikes] == [8]
    assert trainer.progress_checker.skipped_steps == single.progress_checker.skipped_steps == 1
    assert trainer.progress_checker.step == 12
    assert distance(trainer, single) < LIMIT


@on_ranks(0, 1, 2)
def test_ema_and_early_stopping(stage: int) -> None:
    add_ons = (EMAAddon, EarlyStoppingAddon)
    options = {"decay": 0.8, "patience": 2, "delta": 0.5, "gradient_clip": 0.05}
    trainer, single = (make(each, *add_ons, **options) for each in (stage, None))
    here, there = trainer.run(9, data(32), data(13, 2, False)), single.run(9, data(32, 8), data(13, 2, False))
    assert here["stop_reason"] == there["stop_reason"] is not None
    assert distance(trainer, single) < LIMIT
    for name, value in single.average.items():
        assert name.endswith("key.bias") or float((trainer.average[name] - value).abs().max()) < LIMIT


def logged(stage: int | None, folder: Path) -> Any:
    """Train with three loggers, and return the rows that each has written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of what MLflow imports.
        import mlflow.store.tracking.sqlalchemy_store

    store = f"sqlite:///{folder}.db"
    paths = {"jsonl_path": folder / "log.jsonl", "log_dir": folder / "events",
             "web_logger": {"mlflow": {"tracking_uri": store, "experiment_name": "zae"}}}  # fmt: skip
    trainer = make(stage, JSONLLoggerAddon, TensorBoardLoggerAddon, MLflowLoggerAddon, **paths)
    trainer.run(2, data(32, 4 if stage is not None else 8), data(9, 2, False))
    trainer.barrier()
    lines = [json.loads(each) for each in (folder / "log.jsonl").read_text().splitlines()]
    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("zae").experiment_id])
    history = {name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
               for name in run.data.metrics}  # fmt: skip
    return [each for each in lines if "epoch" in each], scalars(folder / "events"), history


@on_ranks(0, 3)
def test_loggers_have_each_row_once(stage: int, tmp_path: Path) -> None:
    """JSONL, TensorBoard and MLflow: rank 0 alone writes, and the figures are those of one process."""
    own = logged(stage, tmp_path / "ranks")
    rows, points, history = logged(None, tmp_path / f"one-{dist.get_rank()}")
    assert [each.keys() for each in own[0]] == [each.keys() for each in rows]
    assert len(rows) == 4
    for name in ("train/loss", "valid/loss"):
        losses, expected_losses = ([each[name] for each in some if name in each] for some in (own[0], rows))
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for found, expected in ((own[1], points), (own[2], history)):
            assert found.keys() == expected.keys()
            assert len(found[name]) == 2
            assert [step for step, *_ in found[name]] == [step for step, *_ in expected[name]]


@on_ranks(0, 1, 2, 3)
def test_observers_and_sharded_checkpoints(stage: int, tmp_path: Path) -> None:
    """What only looks changes nothing; a state whose tensors have no parts that zae knows is written whole."""
    add_ons = (CallbackAddon, PrefetchAddon, StateManagerAddon)

    def run(name: str, **options: Any) -> Any:
        paths = {"save_path": tmp_path / name, "save_format": "sharded"}
        limits = {} if "resume" in options else {"max_steps": 3}
        trainer = make(stage, *add_ons, callbacks=[], save_every=3, **paths, **options)
        trainer.run(3, data(16, 4, False), data(3, 1, False), **limits)
        return trainer

    single = make(None)
    single.run(3, data(16, 8, False))
    run("begun")
    assert distance(run("again", resume=str(tmp_path / "begun")), single) < LIMIT


@on_ranks(0, 1, 2)
def test_adapters(stage: int, tmp_path: Path) -> None:
    """PEFT: the frozen model stays as it is, and checkpoints have the adapters alone."""
    from peft import LoraConfig, get_peft_model

    trainers = []
    for kind in (stage, None):
        torch.manual_seed(3)
        model = get_peft_model(net(F32), LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
        trainer = make(kind, PEFTAddon, model=model, gradient_clip=0.05)
        trainer.run(2, data(32, 4 if kind is not None else 8))
        trainers.append(trainer)
    own = weights(trainers[0])
    assert own
    assert all("lora" in name for name in own)
    assert distance(*trainers) < LIMIT
    trainers[0].save_model(tmp_path / "adapters.safetensors")
    trainers[0].barrier()
    trainers[1].apply_weights(tmp_path / "adapters.safetensors")
    assert distance(*trainers) == 0
    # Frozen weights that are loaded belong to the base from then on: they are no changed ones, which would be saved.
    parameters = trainers[1].unwrap().named_parameters()
    base = {name: each.detach() + 0.5 for name, each in parameters if not each.requires_grad}
    trainers[0].apply_weights({**weights(trainers[1]), **base})
    assert weights(trainers[0]).keys() == own.keys()


@on_ranks(0, 1, 2, 3)
def test_what_the_engine_cannot_train_is_refused(stage: int) -> None:
    class Part(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": self.model.embed(batch[0]).square().mean()}

    class Unused(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": self.model(batch[0]).mean() + 0 * super().train_step(batch)["loss"]}

    with pytest.raises(ConfigError, match="call all of it"):
        make(stage, task=Part).run(1, data(16))
    model = net(F32)
    model.spare = nn.Linear(2, 2)
    with pytest.raises(DistributedError, match=r"did not use spare\.weight, spare\.bias"):
        make(stage, model=model).run(1, data(16))
    with pytest.raises(ConfigError, match="float64, and DeepSpeed steps weights in float32"):
        make(stage, model=net()).run(1, data(16))
    trainer = make(stage)
    trainer.run(1, data(16))
    trainer.unwrap().blocks[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="was frozen, unfrozen, added or replaced"):
        trainer.run(1, data(16))
    if stage:
        with pytest.raises(ConfigError, match="DeepSpeed has divided this model for another trainer"):
            make(stage, model=trainer.unwrap().requires_grad_(True)).run(1, data(16))
        with pytest.raises(ConfigError, match="ZeRO gives Adafactor a part"):
            make(stage, optimizer=torch.optim.Adafactor).run(1, data(16))

        class Changes(Task):
            def on_step_end(self, outputs: Any) -> None:
                super().on_step_end(outputs)
                with torch.no_grad():
                    self.unwrap().head.bias.add_(1)

        if stage < 3:
            with pytest.raises(ConfigError, match="weights were changed in place"):
                make(stage, task=Changes).run(1, data(32))


# ------------------------------------------------------------------------- refused without DeepSpeed; one process


TWO = {"device": ["cpu", "cpu"]}


def refused(match: str, *add_ons: Any, task: type[Trainer] = Task, **options: Any) -> None:
    given = {"optimizer": adamw, "log_bar": False, **TWO, **options}
    with pytest.raises(ConfigError, match=match):
        task.add_on(DeepSpeedAddon, *add_ons)(net(F32), **given)


@pytest.mark.parametrize(("asked", "options"), [("bf16", {}), ("fp16", {"deepspeed_bf16": True})])
def test_a_precision_of_accelerate_launch(asked: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    refused(f"asked for mixed_precision={asked}.*deepspeed_bf16=True and --mixed_precision bf16, or", **options)
    if asked == "bf16":
        assert make(1, deepspeed_bf16=True, **TWO).deepspeed_bf16


def test_options_that_cannot_be_meant(tmp_path: Path) -> None:
    refused("zero_stage=4; it must be 0, 1, 2 or 3", zero_stage=4)
    refused(r"zero_stage", zero_stage="two")
    refused(r"deepspeed_bf16", deepspeed_bf16="yes")
    refused(r"write zero_stage=1", zero_stage=0, deepspeed_bf16=True)
    refused(r"precision='bf16'", device="cpu", deepspeed_bf16=True)
    refused(r"cannot be read as a JSON file", deepspeed_config=tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    refused(r"cannot be read as a JSON file", deepspeed_config=str(tmp_path / "broken.json"))
    (tmp_path / "list.json").write_text("[1]")
    refused(r"deepspeed_config is \[1\]; give a dict, or the path", deepspeed_config=tmp_path / "list.json")
    refused(r"give a dict, or the path", deepspeed_config=3)
    refused(r"one with several groups", optimizer=[adamw, adamw])
    refused(r"write zero_stage=2 without deepspeed_bf16", EMAAddon, zero_stage=3)
    refused(r"PEFTAddon reads the frozen weights, .* write zero_stage=2", PEFTAddon, zero_stage=3)


def test_entries_of_a_configuration_that_are_not_used() -> None:
    for config, match in (
        ({"fp16": {"enabled": True}}, r"fp16 is not used with DeepSpeedAddon; write 'bf16'"),
        ({"scheduler": {"type": "WarmupLR"}}, r"give the trainer a scheduler"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, r"FSDPAddon, cpu_offload=True"),
        ({"zero_optimization": {"stagge": 1}}, r"zero_optimization\.stagge is not used .* did you mean 'stage'"),
        ({"zero_optimization": 2}, r"zero_optimization is 2, and must be a dict"),
        ({"zero_optimisation": {"stage": 2}}, r"zero_optimisation is not used .* did you mean 'zero_optimization'"),
        ({"curriculum_learning": {}}, r"curriculum_learning is not used"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, r"give the trainer an optimizer: optimizer=torch"),
        ({"zero_optimization": {"stage": 5}}, "zero_stage=5; it must be 0, 1, 2 or 3"),
    ):
        refused(match, deepspeed_config=config)
    off = {"fp16": {"enabled": False}, "zero_optimization": {"offload_param": {"device": "none"}}}
    assert make(None, DeepSpeedAddon, task=Task).zero_stage == 2
    assert make(1, deepspeed_config=off).zero_stage == 1


def test_two_truths_that_differ() -> None:
    stage = {"zero_optimization": {"stage": 3}}
    refused(r"stage=3, and the trainer zero_stage=2; write 'auto'", deepspeed_config=stage, zero_stage=2)
    bf16 = {"bf16": {"enabled": True}}
    refused(r"enabled=True, and the trainer deepspeed_bf16=False", deepspeed_config=bf16, deepspeed_bf16=False)
    for config, option in (
        ({"gradient_clipping": 1.0}, "gradient_clip=0.5"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=4"),
        ({"train_micro_batch_size_per_gpu": 3}, "batch_size=4 of the loader"),
        ({"train_batch_size": 16}, "batch_size=4 of the loader in 4 batches on 2 ranks"),
    ):
        options = {"gradient_clip": 0.5, "gradient_accumulation_steps": 4, "deepspeed_config": config, **TWO}
        trainer = make(1, DeepSpeedAddon, GradientAccumulationAddon, **options)
        with pytest.raises(ConfigError, match=f"and the trainer {option}; write 'auto' there, or the same in both"):
            trainer.wrap_loader(data(32), True)
        with pytest.raises(ConfigError, match=f"and the trainer {option}; write 'auto' there, or the same in both"):
            trainer.plan(1, data(32))
    whole = {"deepspeed_config": {"train_batch_size": 16}, "global_batch_size": 24, **TWO}
    trainer = make(1, DeepSpeedAddon, GradientAccumulationAddon, **whole)
    with pytest.raises(ConfigError, match="batch_size=4 of the loader in 3 batches on 2 ranks"):
        trainer.wrap_loader(data(48), True)
    same = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 4}
    make(1, deepspeed_config=same, gradient_clip=0.5, **TWO).wrap_loader(data(32), True)


def test_one_process_trains_without_deepspeed() -> None:
    trainer, single = make(3), make(None)
    trainer.run(1, data(16))
    single.run(1, data(16))
    assert distance(trainer, single, without="none") == 0
    assert "deepspeed" not in sys.modules or trainer._zero is None
