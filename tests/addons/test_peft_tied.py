"""Export a merged adapter of a model with tied weights: it computes what was trained, or is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from zae import ConfigError, Trainer
from zae.addons import PEFTAddon, StateManagerAddon

IDS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))


class LanguageModel(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(input_ids=batch, labels=batch).loss}

    test_step = train_step


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    )


PARTS = {llama: ("q_proj", "embed_tokens"), gpt2: ("c_attn", "wte"), t5: ("q", "shared")}
NOT_TIED, ADAPTED = True, False
"""Whether the model is merged: the adapter changes no module whose weight another one has."""
KINDS: dict[str, tuple[bool, Any]] = {
    "not the tied ones": (NOT_TIED, lambda own, tied: {"target_modules": [own]}),
    "tokens are trained": (ADAPTED, lambda own, tied: {"target_modules": [own], "trainable_token_indices": [1, 2]}),
    "the embedding": (ADAPTED, lambda own, tied: {"target_modules": [own, tied]}),
    "the head": (ADAPTED, lambda own, tied: {"target_modules": [own, "lm_head"]}),
    "both": (ADAPTED, lambda own, tied: {"target_modules": [own, tied, "lm_head"]}),
    "tied by peft": (ADAPTED, lambda own, tied: {"target_modules": [own, tied], "ensure_weight_tying": True}),
    "DoRA": (ADAPTED, lambda own, tied: {"target_modules": [own, tied], "use_dora": True}),
    "the head is trained": (ADAPTED, lambda own, tied: {"target_modules": [own], "modules_to_save": ["lm_head"]}),
    "the embedding is trained": (ADAPTED, lambda own, tied: {"target_modules": [own], "modules_to_save": [tied]}),
}


def trained(base: Any, options: Any, *add_ons: Any, **more: Any) -> Any:
    """A trainer that has trained an adapter; then each of its weights is moved, so that none of them is still zero."""

    def model() -> Any:
        torch.manual_seed(0)
        return base()

    def optimizer(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=5e-2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Those of peft about tied weights.
        given = {"peft_config": peft.LoraConfig(r=2, **options), "seed": 0, "log_bar": False, **more}
        trainer = LanguageModel.add_on(PEFTAddon, *add_ons)(model, "cpu", optimizer=optimizer, **given)
        trainer.run(1, [IDS] * 3)
    draws = torch.Generator().manual_seed(0)
    for parameter in trainer.unwrap().parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
    return trainer


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS, labels=IDS).logits
    return found


def exported(trainer: Any, path: Path, base: Any) -> Any:
    """The merged model as it is loaded, or the text of the refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.save_merged(path)
        except ConfigError as error:
            assert not path.is_file()
            assert not [*path.glob("**/*.safetensors")]
            return str(error)
        if not path.suffix:
            return type(base()).from_pretrained(path)
        model = base()
        model.load_state_dict(load_file(path), strict=False)  # The file has a tied weight under one of its names.
        return model


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("base", PARTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_the_trained_one_or_is_refused(base: Any, kind: str, tmp_path: Path) -> None:
    """In a folder and in a file; the adapter alone is saved in any case, and the trainer stays as it is."""
    mergeable, options = KINDS[kind]
    trainer = trained(base, options(*PARTS[base]))
    want = logits(trainer.unwrap())
    trainer.save_model(tmp_path / "adapter")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(adapter), want, rtol=1e-4, atol=1e-4)
    in_folder, in_file = (exported(trainer, tmp_path / name, base) for name in ("merged", "merged.safetensors"))
    for found in (in_folder, in_file):
        assert isinstance(found, str) is not mergeable
        if isinstance(found, str):
            assert "the merged model would not be the one that was trained: " in found
            assert "save_model(folder)" in found
        else:
            torch.testing.assert_close(logits(found), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(trainer.unwrap()), want)


class Tied(nn.Module):
    """A network of the user, with an activation that it keeps, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.kept = self.first(inputs).relu()
        outputs: torch.Tensor = self.last(self.second(self.kept))
        return outputs


class Task(Trainer):
    def train_step(self, batch: torch.Tensor) -> Any:
        return {"loss": (self.model(batch) - 1).square().mean()}

    test_step = train_step


@pytest.mark.parametrize(("targets", "can_merge"), [(["last"], True), (["first"], False), (["first", "second"], False)])
@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.IA3Config, peft.LoHaConfig])
def test_a_network_of_the_user(kind: Any, targets: list[str], can_merge: bool, tmp_path: Path) -> None:
    more = {"feedforward_modules": []} if kind is peft.IA3Config else {}
    torch.manual_seed(0)
    options: dict[str, Any] = {"peft_config": kind(target_modules=targets, **more), "seed": 0, "log_bar": False}
    trainer = Task.add_on(PEFTAddon)(Tied, "cpu", optimizer=lambda each: torch.optim.AdamW(each, lr=0.1), **options)
    inputs = torch.rand(6, 8)
    trainer.run(1, [inputs] * 3)
    if can_merge:
        merged = Tied()
        weights = load_file(trainer.save_merged(tmp_path / "merged.safetensors"))
        merged.load_state_dict(weights, strict=False)  # The file has a tied weight under one of its names.
        torch.testing.assert_close(merged(inputs), trainer.unwrap().eval()(inputs))
    else:
        with pytest.raises(ConfigError, match=r"first\.weight and second\.weight are one weight of Tied"):
            trainer.save_merged(tmp_path / "merged.safetensors")
        assert [*tmp_path.iterdir()] == []


def test_a_resume_warns_of_no_view_of_what_is_saved(tmp_path: Path, caplog: Any) -> None:
    """peft keeps views of the tied adapter in ``lm_head.kwargs``, which change with the weights."""
    options = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    for _ in range(2):
        trained(llama, options, StateManagerAddon, save_path=tmp_path, resume="auto")
    assert "lacks" not in caplog.text


class Views(nn.Module):
    """A view of a weight, which is restored with it, and a tensor of its own, which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.view = [self.inner.weight.t()]
        self.own = torch.zeros(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.own += 1
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def test_a_resume_restores_a_tensor_of_its_own_and_keeps_a_view(tmp_path: Path) -> None:
    for epochs in (1, 2):
        options: dict[str, Any] = {"optimizer": torch.optim.SGD, "save_path": tmp_path, "resume": "auto"}
        trainer = Task.add_on(StateManagerAddon)(Views, "cpu", seed=0, log_bar=False, **options)
        trainer.run(epochs, [torch.ones(2, 4)] * 3)
    model = trainer.unwrap()
    assert model.own.tolist() == [6.0] * 3
    assert model.view[0].data_ptr() == model.inner.weight.data_ptr()
