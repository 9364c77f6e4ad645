"""PEFTAddon with the kinds of adapters, models of Transformers, quantized bases, kills and foreign checkpoints."""

from __future__ import annotations

import copy
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from kit import hand
from kit.faults import Disk, KillingDisk, forked, installed
from kit.table import Task
from zae import AddOnBase, CheckpointMismatch, ConfigError, Every, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    GradientAccumulationAddon,
    HuggingFaceAddon,
    JSONLLoggerAddon,
    PEFTAddon,
    StateManagerAddon,
)

SAVING = {"save_every": 2, "keep_last": 99, "keep_best": 0}


def llama(layers: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def tokens() -> Any:
    rows = torch.randint(16, (12, 5), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 2)


class LanguageModel(Trainer):
    """Predict the next token."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(input_ids=batch[0], labels=batch[0]).loss}

    test_step = train_step


def config(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})


def build(*add_ons: type[AddOnBase], task: Any = LanguageModel, model: Any = llama, **options: Any) -> Any:
    given = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.05), "seed": 5, "log_bar": False, **options}
    return task.add_on(PEFTAddon, StateManagerAddon, *add_ons)(model, "cpu", **given)


def copied(folder: Path, step: int) -> Path:
    target = folder.with_name(f"{folder.name}-{step}")
    shutil.copytree(folder / f"step-{step:08d}", target / f"step-{step:08d}")
    return target


# ------------------------------------------------------------------------------------------------ kinds of adapters


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"lora_dropout": 0.5, "modules_to_save": ["lm_head"]}, 5),
        ({"use_dora": True}, 6),
        ({"use_rslora": True, "bias": "all"}, 12),
    ],
    ids=["modules-to-save", "dora", "rslora-bias"],
)
def test_a_causal_language_model(options: Any, trained: int, tmp_path: Path) -> None:
    """Resumed bitwise in mid-epoch, with AMP, an average and accumulation; the exports give the same logits."""
    add_ons = (AMPAddon, EMAAddon, GradientAccumulationAddon, JSONLLoggerAddon)
    more = {"precision": "bf16", "decay": 0.8, "gradient_accumulation_steps": 2, **SAVING}

    def run(folder: Path, **given: Any) -> Any:
        given["jsonl_path"] = folder.with_suffix(".jsonl")
        trainer = build(*add_ons, peft_config=config(**options), save_path=folder, **more, **given)
        trainer.run(2, tokens(), tokens())
        return trainer

    trainer = run(tmp_path / "all")
    assert len(trainer.model_state()) == trained
    resumed = run(copied(tmp_path / "all", 2), resume="auto")
    assert hand.digest(resumed.unwrap()) == hand.digest(trainer.unwrap())
    assert resumed.metrics["valid_metrics_history"] == trainer.metrics["valid_metrics_history"]
    trainer.save_model(tmp_path / "adapter")
    trainer.save_merged(tmp_path / "merged")
    ids = torch.arange(5)[None]
    want = trainer.unwrap().eval()(ids).logits
    assert torch.equal(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()(ids).logits, want)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, want)


def test_two_adapters_that_are_trained_in_turn(tmp_path: Path) -> None:
    class Switch(AddOnBase):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            self.unwrap().set_adapter(["default", "second"][self.progress_checker.epoch % 2])

    def two() -> Any:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, target_modules=["0"])
        model = peft.get_peft_model(hand.network(), lora)
        model.add_adapter("second", copy.deepcopy(lora))
        return model

    def run(folder: Path, **options: Any) -> Any:
        trainer = build(Switch, task=Task, model=two(), save_path=folder, **SAVING, **options)
        trainer.run(3, hand.loader())
        return trainer

    trainer = run(tmp_path / "all")
    names = [name for name in trainer.unwrap().state_dict() if "lora" in name]
    assert len(names) == 4
    assert all(not torch.equal(trainer.unwrap().state_dict()[name], two().state_dict()[name]) for name in names)
    for step in (4, 8, 14):
        again = run(copied(tmp_path / "all", step), resume="auto")
        assert hand.digest(again.unwrap()) == hand.digest(trainer.unwrap()), step
    trainer.save_model(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(hand.network(), tmp_path / "adapters")
    loaded.load_adapter(tmp_path / "adapters" / "second", "second")
    assert all(torch.equal(loaded.state_dict()[name], trainer.unwrap().state_dict()[name]) for name in names)


def test_save_model_with_hugging_face_writes_the_adapter(tmp_path: Path) -> None:
    trainer = build(HuggingFaceAddon, peft_config=config(), output_dir=tmp_path / "out", save_every=Every(epochs=1))
    trainer.run(1, tokens())
    trainer.save_model()
    files = {each.name for each in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "zae.json"} <= files
    ids = torch.arange(5)[None]
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "out").eval()
    assert torch.equal(loaded(ids).logits, trainer.unwrap().eval()(ids).logits)


# -------------------------------------------------------------------------------------------------- quantized bases


class Int8Linear(nn.Linear):
    """A layer with weights of 8 bits and a scale for each row, as those of libraries for quantization."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype) * self.scale, self.bias)


def quantized() -> nn.Module:
    model = hand.network()
    torch.manual_seed(0)
    model[0] = Int8Linear(model[0])
    return model


def test_a_base_of_8_bits(tmp_path: Path) -> None:
    def run(folder: Path, model: Any = quantized, **options: Any) -> Any:
        lora = peft.LoraConfig(r=2, target_modules=["0"])
        trainer = build(task=Task, model=model, peft_config=lora, save_path=folder, **SAVING, **options)
        trainer.run(2, hand.loader())
        return trainer

    trainer = run(tmp_path / "all")
    state = trainer.unwrap().state_dict()
    assert state["base_model.model.0.base_layer.weight"].dtype == torch.int8
    assert not any("base_layer" in name for name in trainer.model_state())
    again = run(copied(tmp_path / "all", 8), resume="auto")
    assert hand.digest(again.unwrap()) == hand.digest(trainer.unwrap())

    def other() -> nn.Module:
        model = quantized()
        model[0].weight.data[0, 0] += 1
        return model

    with pytest.raises(CheckpointMismatch, match=r"another base model.*first base_model.model.0.base_layer.weight"):
        run(copied(tmp_path / "all", 6), other, resume="auto")
    with pytest.raises(ConfigError, match=r"cannot be merged.*apply it to the base model in float and merge there"):
        trainer.save_merged(tmp_path / "merged.safetensors")
    trainer.save_model(tmp_path / "adapter")
    peft.PeftModel.from_pretrained(hand.network(), tmp_path / "adapter").merge_and_unload()


# --------------------------------------------------------------------------------- kills, and foreign checkpoints


def test_killed_at_drawn_operations_it_ends_the_same(tmp_path: Path) -> None:
    def run(folder: Path, disk: Disk) -> Any:
        lora = peft.LoraConfig(r=2, target_modules=["0"], lora_dropout=0.3)
        options = {**SAVING, "save_every": 1, "resume": "auto", "save_weights_every": 3}
        trainer = build(task=Task, model=hand.network, peft_config=lora, save_path=folder, **options)
        with installed(disk):
            trainer.run(8, hand.loader())
        return trainer

    whole, draw = run(tmp_path / "whole", counting := Disk()), random.Random(0)
    for _ in range(4):  # At most a fifth of the operations of the whole run in each life: none comes to the end.
        killing = KillingDisk(draw.randrange(len(counting.log) // 5), torn=draw.random() < 0.5)
        outcome = forked(lambda: run(tmp_path / "killed", killing) and None)  # noqa: B023
        assert outcome.status == -signal.SIGKILL, outcome.error
    assert hand.digest(run(tmp_path / "killed", Disk()).unwrap()) == hand.digest(whole.unwrap())
    names = [sorted(each.name for each in (tmp_path / run).glob("weights-*")) for run in ("whole", "killed")]
    assert names[0] == names[1]
    for name in names[0]:
        files = [load_file(tmp_path / run / name) for run in ("whole", "killed")]
        assert all(torch.equal(value, files[1][key]) for key, value in files[0].items())


def changed(base: Any) -> dict[str, Any]:
    return {**base, next(iter(base)): "0" * 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed, "1 of 29 differ"),
        (
            lambda base: {**base, "base_model.model.more": "0"},
            "this model does not have 1 frozen weights, first",
        ),
        (lambda base: dict(list(base.items())[1:]), "no hash of 1 frozen weights"),
        (lambda base: dict.fromkeys(base, 7), "29 of 29 differ"),
        (lambda base: ["x"], "does not contain the hashes of a base model"),
    ],
    ids=["other", "more", "fewer", "numbers", "list"],
)
def test_a_foreign_state_is_refused_before_anything_changes(change: Any, message: str, state: Any) -> None:
    trainer, before = build(peft_config=config(), save_path="x"), None
    before = hand.digest(trainer.unwrap())
    foreign = {**state, "PEFTAddon": {**state["PEFTAddon"], "base": change(state["PEFTAddon"]["base"])}}
    with pytest.raises(CheckpointMismatch, match=message):
        trainer.load_state_dict(foreign)
    assert hand.digest(trainer.unwrap()) == before
    trainer.load_state_dict(state)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the state after an epoch."""
    trainer = build(peft_config=config(), save_path=tmp_path_factory.mktemp("state"), save_every=Every(epochs=1))
    trainer.run(1, tokens())
    return trainer.state_dict()


def test_a_deeper_base_with_the_adapter_on_the_same_layers_is_refused(state: Any) -> None:
    lora = config(layers_to_transform=[0, 1])
    deeper = build(model=lambda: llama(layers=3), peft_config=lora, save_path="x")
    with pytest.raises(CheckpointMismatch, match=r"no hash of \d+ frozen weights, first .*layers.2"):
        deeper.load_state_dict(state)
