"""PEFTAddon: what checkpoints of adapters contain, the base model that they need, and how they train and compose."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kit import hand
from kit.table import Task
from zae import AddOnBase, CheckpointError, CheckpointMismatch, ConfigError
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EMAAddon,
    GradientAccumulationAddon,
    PEFTAddon,
    StateManagerAddon,
)
from zae.doctor.checkpoints import examine
from zae.testing import check_addon

LORA = "base_model.model.0.lora_A.default.weight", "base_model.model.0.lora_B.default.weight"
HEAD = "base_model.model.4.modules_to_save.default.bias", "base_model.model.4.modules_to_save.default.weight"
NORM = tuple(f"base_model.model.1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var"))
SAVING = {"save_every": 1, "keep_last": 99, "keep_best": 0}


def config(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["0"], "modules_to_save": ["4"], **options})


def trainer_of(*add_ons: type[AddOnBase], model: Any = hand.network, **options: Any) -> Any:
    given = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.05), "peft_config": config(), **options}
    return Task.add_on(PEFTAddon, *add_ons)(model, "cpu", seed=5, log_bar=False, **given)


def by_hand(epochs: int, **options: Any) -> nn.Module:
    """The same adapter, trained by a loop without zae."""
    torch.manual_seed(5)
    model = peft.get_peft_model(hand.network(), config())
    trained = [each for each in model.parameters() if each.requires_grad]
    torch.manual_seed(5)
    hand.train(model, torch.optim.AdamW(trained, lr=0.05), hand.loader(), epochs, **options)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Two epochs of six steps, saved after each step."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_of(StateManagerAddon, save_path=folder / "save", **SAVING)
    trainer.run(2, hand.loader())
    return trainer, folder / "save"


def copied(folder: Path, *steps: int) -> Path:
    """Copy checkpoints to a new folder, for a run to resume from."""
    target = folder.with_name(f"copy-{len(list(folder.parent.iterdir()))}")
    for step in steps:
        shutil.copytree(folder / f"step-{step:08d}", target / f"step-{step:08d}")
    return target


# ------------------------------------------------------------------------------------------------------- training


def test_an_adapter_trains_bitwise_as_in_a_loop_by_hand(run: Any) -> None:
    assert hand.digest(run[0].unwrap()) == hand.digest(by_hand(2))


def test_an_optimizer_that_was_given_frozen_weights_does_not_decay_them() -> None:
    model = peft.get_peft_model(hand.network(), config())
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    trainer = trainer_of(model=model, optimizer=optimizer, peft_config=None)
    trainer.run(1, hand.loader())
    present = dict(model.named_parameters())
    assert len(frozen) == 6
    assert all(torch.equal(present[name], value) for name, value in frozen.items())
    assert len(optimizer.state) == 4


@pytest.mark.parametrize(
    ("add_on", "options", "same"),
    [
        (AMPAddon, {"precision": "bf16"}, {"precision": "bf16"}),
        (GradientAccumulationAddon, {"gradient_accumulation_steps": 4}, {"accumulate": 4}),
        (CompileAddon, {"compile_backend": "eager"}, {}),
    ],
    ids=["amp", "accumulation", "compile"],
)
def test_it_trains_as_by_hand_with_another_add_on(add_on: Any, options: Any, same: Any) -> None:
    trainer = trainer_of(add_on, **options)
    trainer.run(2, hand.loader())
    assert hand.digest(trainer.unwrap()) == hand.digest(by_hand(2, **same))


def test_the_average_has_what_is_trained_and_leaves_the_base_bitwise() -> None:
    trainer = trainer_of(EMAAddon, decay=0.75)
    seen = {}

    class Look(AddOnBase):
        def on_validation_begin(self) -> None:
            super().on_validation_begin()
            seen.update(trainer.average)

    base = hand.network()[0].weight.detach().clone()
    trainer.run(2, hand.loader(), hand.loader())
    assert set(trainer.average) == {*LORA, *HEAD, *NORM}
    with trainer.ready(), trainer.evaluation_context():
        state = trainer.unwrap().state_dict()
        assert torch.equal(state["base_model.model.0.base_layer.weight"], base)
        assert torch.equal(state[LORA[1]], trainer.average[LORA[1]])
    assert not torch.equal(trainer.unwrap().state_dict()[LORA[1]], trainer.average[LORA[1]])


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_has_what_is_trained_and_the_base_by_hash(run: Any) -> None:
    trainer, folder = run
    assert set(load_file(folder / "step-00000012" / "model.safetensors")) == {*LORA, *HEAD, *NORM}
    assert set(trainer.state_dict()["PEFTAddon"]["base"]) == set(trainer.unwrap().state_dict()) - {*LORA, *HEAD}
    trainer.save_model(folder.parent / "adapter.safetensors")
    assert set(load_file(folder.parent / "adapter.safetensors")) == {*LORA, *HEAD, *NORM}
    assert examine(folder)["healthy"]


@pytest.mark.parametrize("step", [6, 8])
def test_a_resume_is_bitwise_the_uninterrupted_run(run: Any, step: int) -> None:
    trainer, folder = run
    resumed = trainer_of(StateManagerAddon, save_path=copied(folder, step), resume="auto", **SAVING)
    resumed.run(2, hand.loader())
    assert hand.digest(resumed.unwrap()) == hand.digest(trainer.unwrap())
    assert resumed.metrics["train_metrics_history"] == trainer.metrics["train_metrics_history"]


def other_base() -> nn.Module:
    model = hand.network()
    with torch.no_grad():
        model[0].bias[3] += 1
    return model


def test_another_base_is_refused_with_what_differs(run: Any) -> None:
    _, folder = run
    other = trainer_of(StateManagerAddon, model=other_base, save_path=copied(folder, 8), resume="auto")
    message = r"hash [0-9a-f]{12} and those of this model [0-9a-f]{12}; 1 of 6 differ, first base_model.model.0.base_"
    with pytest.raises(CheckpointMismatch, match=message + "layer.bias"):
        other.run(2, hand.loader())
    other.apply_weights(folder / "step-00000008")  # What the message says to write.
    assert torch.equal(
        other.unwrap().state_dict()[LORA[0]], load_file(folder / "step-00000008/model.safetensors")[LORA[0]]
    )


def test_missing_trained_weights_are_refused(run: Any) -> None:
    trainer, _ = run
    weights = trainer.model_state()
    fresh = trainer_of()
    before = hand.digest(fresh.unwrap())
    with pytest.raises(CheckpointMismatch, match=r"1 missing .*lora_A"):
        fresh.apply_weights({name: value for name, value in weights.items() if name != LORA[0]})
    assert hand.digest(fresh.unwrap()) == before
    assert fresh.apply_weights({LORA[0]: weights[LORA[0]]}, strict=False) == ([LORA[1], *reversed(HEAD)], [])
    assert fresh.apply_weights(weights) == ([], [])


def test_a_checkpoint_with_all_weights_loads_and_its_base_counts() -> None:
    torch.manual_seed(0)
    whole = Task(peft.get_peft_model(hand.network(), config()), "cpu", optimizer=torch.optim.AdamW, log_bar=False)
    whole.run(1, hand.loader())
    other = trainer_of(model=other_base)
    other.load_state_dict(whole.state_dict())
    assert hand.digest(other.unwrap()) == hand.digest(whole.unwrap())
    same = trainer_of()
    same.load_state_dict(other.state_dict())


def test_weights_that_were_trained_before_they_were_frozen_are_saved(tmp_path: Path) -> None:
    class Thaw(AddOnBase):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            self.unwrap().get_parameter("base_model.model.1.weight").requires_grad_(self.progress_checker.epoch == 0)

    def make(folder: Path, **options: Any) -> Any:
        return trainer_of(Thaw, StateManagerAddon, save_path=folder, save_every=1, keep_last=99, keep_best=0, **options)

    straight = make(tmp_path / "a")
    straight.run(2, hand.loader())
    assert "base_model.model.1.weight" in load_file(tmp_path / "a" / "step-00000008" / "model.safetensors")
    resumed = make(copied(tmp_path / "a", 8), resume="auto")
    resumed.run(2, hand.loader())
    assert hand.digest(resumed.unwrap()) == hand.digest(straight.unwrap())


def test_the_add_on_keeps_its_contract() -> None:
    check_addon(PEFTAddon)


# --------------------------------------------------------------------------------------------------------- export


def test_the_adapter_loads_with_peft_and_the_merged_model_gives_the_same(run: Any, tmp_path: Path, caplog: Any) -> None:
    trainer, _ = run
    before = hand.digest(trainer.unwrap())
    assert trainer.save_merged(tmp_path / "merged.safetensors") == tmp_path / "merged.safetensors"
    trainer.save_model(tmp_path / "adapter")
    assert "running_mean" in caplog.text  # The format of peft has no place for it.
    assert hand.digest(trainer.unwrap()) == before
    x = torch.randn(5, 4)
    want = copy.deepcopy(trainer.unwrap()).eval()
    merged = hand.network()
    merged.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    torch.testing.assert_close(merged.eval()(x), want(x))
    assert torch.equal(merged[0].weight, copy.deepcopy(want).merge_and_unload()[0].weight)
    loaded = peft.PeftModel.from_pretrained(hand.network(), tmp_path / "adapter")
    for name in (*LORA, *HEAD):
        assert torch.equal(loaded.state_dict()[name], want.state_dict()[name])
    assert sorted(each.name for each in (tmp_path / "adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_a_merged_adapter_is_not_saved() -> None:
    trainer = trainer_of()
    trainer.unwrap().merge_adapter()
    with pytest.raises(CheckpointError, match=r"merged into the base weights \(base_model.model.0\).*unmerge_adapter"):
        trainer.state_dict()
    trainer.unwrap().unmerge_adapter()
    trainer.state_dict()


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"peft_config": config(target_modules=["query"])},
            "No modules were targeted.*Its linear layers: 0, 4; write target",
        ),
        (
            {"peft_config": config(target_modules=["query"], modules_to_save=None)},
            "'query'} not found.*Its linear layers: 0, 4",
        ),
        ({"peft_config": config(), "model": nn.Sequential(nn.ReLU())}, "it has no parameters. Its linear layers: none"),
        ({"peft_config": {"r": 8}}, "peft_config is a dict; give a configuration of peft"),
        ({"peft_config": peft.AdaLoraConfig(total_step=9)}, "no state contains: a resumed run would differ"),
        ({"peft_config": config(inference_mode=True)}, "no parameter of PeftModel requires gradients"),
        ({"model": hand.network().requires_grad_(False), "peft_config": None}, "no parameter of Sequential requires"),
        (
            {"model": peft.get_peft_model(hand.network(), config())},
            "which has an adapter, and peft_config adds another",
        ),
    ],
    ids=["targets", "no-targets", "empty", "dict", "adalora", "inference", "frozen", "twice"],
)
def test_what_cannot_be_trained_is_refused_at_construction(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(**options)


def test_an_optimizer_of_the_base_is_refused() -> None:
    model = hand.network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"SGD holds 2 parameters, all of them frozen.*optimizer=lambda parameters: SGD"
    ):
        trainer_of(model=model, optimizer=optimizer)


def test_a_model_without_adapter_trains_as_a_whole_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(peft_config=None)
    assert "PEFTAddon trains and saves all of it" in caplog.text


# -------------------------------------------------------------------------------------------------- a new run from one


def test_a_new_run_starts_from_an_adapter_of_the_same_base(run: Any, tmp_path: Path) -> None:
    trainer, folder = run
    started = trainer_of(StateManagerAddon, save_path=tmp_path / "new", start_from=folder)
    with started.ready():
        assert hand.digest(started.unwrap()) == hand.digest(trainer.unwrap())
    assert (started.progress_checker.step, started.last_path) == (0, None)
    trainer.save_model(tmp_path / "adapter.safetensors")
    of_file = trainer_of(StateManagerAddon, save_path=tmp_path / "2", start_from=tmp_path / "adapter.safetensors")
    with of_file.ready():
        assert hand.digest(of_file.unwrap()) == hand.digest(trainer.unwrap())
    other = trainer_of(StateManagerAddon, model=other_base, save_path=tmp_path / "3", start_from=folder)
    with pytest.raises(CheckpointMismatch, match="another base model"):
        other.run(1, hand.loader())


def test_a_checkpoint_without_the_adapter_says_where_to_load_it(tmp_path: Path) -> None:
    model = hand.network()
    whole = Task.add_on(StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.AdamW, log_bar=False, save_path=tmp_path / "whole"
    )
    whole.run(1, hand.loader())
    adapted = trainer_of(StateManagerAddon, save_path=tmp_path / "new", start_from=tmp_path / "whole")
    with pytest.raises(
        CheckpointMismatch, match=r"without this adapter \(first \d\..*\). Load them into the base model"
    ):
        adapted.run(1, hand.loader())
