"""Adapters of peft on each engine: the weights of one process, and checkpoints that load into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_engines import LIMIT, assert_same_history, on_engine
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from kit.engines import ENGINES, Engine, build, data, distance, net, weights
from zae import AddOnConflict, ConfigError
from zae.addons import (
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    PEFTAddon,
    PipelineAddon,
    StateManagerAddon,
)

ADD_ONS = (PEFTAddon, EMAAddon, GradientAccumulationAddon, JSONLLoggerAddon, StateManagerAddon)
SAVING = {"save_every": 1, "keep_last": 9, "keep_best": 0, "save_weights_every": 2}

BASE = "base_model.model"
PLAN = {
    f"{BASE}.blocks.*.query.base_layer": ColwiseParallel(output_layouts=Replicate()),
    f"{BASE}.blocks.*.up": ColwiseParallel(),
    f"{BASE}.blocks.*.down": RowwiseParallel(),
}


def adapted() -> Any:
    torch.manual_seed(3)
    config = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["head"], "init_lora_weights": False}
    return peft.get_peft_model(net(), peft.LoraConfig(**config))


def make(engine: Engine | None, folder: Path, **options: Any) -> Any:
    given = {"decay": 0.8, "gradient_accumulation_steps": 2, "gradient_clip": 0.05, **SAVING, **options}
    model = given.pop("model", None) or adapted()
    if "tensor_plan" in (engine.options if engine else {}):
        given["tensor_plan"] = PLAN
    paths = {"save_path": folder, "jsonl_path": folder.with_suffix(".jsonl")}
    return build(engine, *ADD_ONS, model=model, **paths, **given)


def rows(engine: Engine, single: bool = False) -> Any:
    return data(16 * engine.shares, 4 * engine.shares if single else 4)


@pytest.mark.exhaustive
@on_engine
def test_adapters_on_ranks(engine: Engine, tmp_path: Path) -> None:
    """Weights, averages, records and checkpoints of one process; resumed bitwise; the files load into one process.

    PipelineAddon refuses adapters.
    """
    if PipelineAddon in engine.add_ons:
        with pytest.raises(AddOnConflict, match=r"PipelineAddon and PEFTAddon .*train adapters with FSDPAddon"):
            make(engine, tmp_path / "all")
        return
    trainer, single = make(engine, tmp_path / "all"), make(None, tmp_path / f"one-{dist.get_rank()}")
    here = trainer.run(2, rows(engine), data(5, 2, False))
    there = single.run(2, rows(engine, True), data(5, 2, False))
    assert dist.get_world_size() == trainer.world_size == engine.world
    assert (here["step"], there["step"]) == (4, 4)
    assert distance(trainer, single, "none") < LIMIT
    assert_same_history(here, there)
    averages = [each.state_dict()["EMAAddon"]["average"] for each in (trainer, single)]
    assert all(float((averages[0][name] - value).abs().max()) < LIMIT for name, value in averages[1].items())
    trained = weights(trainer)
    assert averages[0].keys() == averages[1].keys() == {*trained, f"{BASE}.scale.factor"}
    again = make(engine, tmp_path / "again", resume=str(tmp_path / "all" / "step-00000003"))
    again.run(2, rows(engine), data(5, 2, False))
    assert all(torch.equal(value, trained[name]) for name, value in weights(again).items())
    assert sorted(each.name for each in (tmp_path / "all").glob("step-*")) == [f"step-{n:08d}" for n in (1, 2, 3, 4)]
    files = sorted((tmp_path / "all").glob("weights-*.safetensors"))
    assert [set(load_file(each)) for each in files] == [set(trained)] * 2
    trainer.save_model(tmp_path / "adapter")
    if engine.layouts == {"replicated"}:
        trainer.save_merged(tmp_path / "merged.safetensors")
    else:
        with pytest.raises(ConfigError, match=r"call save_model\('adapter'\) on all ranks, and merge in one process"):
            trainer.save_merged(tmp_path / "merged.safetensors")
    if trainer.is_main:
        check_files(tmp_path, files[-1], trained)
    trainer.barrier()


def check_files(folder: Path, file: Path, trained: dict[str, torch.Tensor]) -> None:
    """Load what ranks have saved into one process."""
    for start in (file, folder / "all"):
        started = make(None, folder / f"of-{start.name}", start_from=start)
        with started.ready():
            assert all(torch.equal(value, trained[name]) for name, value in started.model_state().items())
    loaded = peft.PeftModel.from_pretrained(net(), folder / "adapter")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in trained.items())
    plain, file = net(), folder / "merged.safetensors"
    plain.load_state_dict(load_file(file) if file.exists() else loaded.merge_and_unload().state_dict())
    whole, tokens = started.unwrap().eval(), torch.arange(6)[None]
    torch.testing.assert_close(plain.eval()(tokens), whole(tokens))
    lines = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
    assert len(lines) == len((folder / "one-0.jsonl").read_text().splitlines())


@pytest.mark.parametrize("name", ["query", "query.base_layer"])
def test_a_plan_that_leaves_parts_of_an_adapted_layer_is_refused(name: str) -> None:
    message = rf"tensor_plan: {BASE}.blocks.0.{name} is a .*\.query\.base_layer': ColwiseParallel\(output_layouts=Repl"
    plan = {f"{BASE}.blocks.*.{name}": ColwiseParallel()}
    trainer = build(ENGINES["tensor"], PEFTAddon, model=adapted(), tensor_plan=plan)
    with pytest.raises(ConfigError, match=message):
        trainer.run(1, data(4))
