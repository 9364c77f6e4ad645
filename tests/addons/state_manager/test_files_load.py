"""Every file of weights loads into a fresh model as docs/howto/convert_a_checkpoint.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from zae import ConfigError, Trainer
from zae.addons import EMAAddon, PEFTAddon, StateManagerAddon

TOKENS = torch.arange(9)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class SharedModule(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.second = self.first

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(super().forward(tokens)))


class NotContiguous(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(4, 9).T)
        self.register_buffer("image", torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last))


class Quantized(Plain):
    """Holds integers, scales and floats of eight bits, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("integers", torch.randint(-128, 127, (9, 4), dtype=torch.int8))
        self.register_buffer("packed", torch.randint(0, 255, (3,), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(9, 1))
        self.register_buffer("eights", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("empty", torch.empty(0, 3))


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(self.head)


class PartsOfOne(Plain):
    """Its buffers share memory, one of them with itself."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(18)
        for name, part in {"left": whole[:9], "right": whole[9:], "again": whole[:9]}.items():
            self.register_buffer(name, part)
        self.register_buffer("expanded", torch.full((1,), 2.0).expand(9))


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(self.model(batch), batch)}

    test_step = train_step


def train(make: Any, folder: Path, *add_ons: Any, **options: Any) -> Any:
    trainer: Any = Task.add_on(StateManagerAddon, *add_ons)(
        make, "cpu", optimizer=torch.optim.AdamW, seed=0, log_bar=False, save_path=folder / "run", **options
    )
    trainer.run(1, [TOKENS] * 2)
    return trainer


def unequal(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Name the tensors of a model that are not those that were saved."""
    return [name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])]


def load_pickled(model: nn.Module, path: Path) -> None:
    model.load_state_dict(torch.load(path))


def apply(model: nn.Module, path: Path) -> None:
    Task(model, "cpu", mode="test").apply_weights(path)


MODELS = (Plain, Tied, SharedModule, NotContiguous, Quantized, Normed)


@pytest.mark.parametrize("make", [*MODELS, PartsOfOne])
def test_each_file_loads_into_a_fresh_model(make: Any, tmp_path: Path) -> None:
    trainer = train(make, tmp_path, EMAAddon, decay=0.5)
    weights = trainer.unwrap().state_dict()
    average = {**weights, **trainer.average}
    loads = [load_model, apply] if make in MODELS else [apply]
    pickled = [load_pickled, apply] if make in MODELS else [apply]
    files: list[tuple[Path, list[Any], Any]] = [
        (trainer.last_path / "model.safetensors", loads, weights),
        (trainer.save_model(tmp_path / "model.safetensors"), loads, weights),
        (trainer.save_average(tmp_path / "average.safetensors"), loads, average),
        *((trainer.save_model(tmp_path / f"model{each}"), pickled, weights) for each in (".pt", ".pth", ".ckpt")),
    ]
    for path, ways, expected in files:
        for load in ways:
            torch.manual_seed(1)
            model = make()
            load(model, path)
            assert unequal(model, expected) == [], (path.name, load.__name__)
            assert torch.isfinite(model(TOKENS)).all()


class TiedWithABody(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(9, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(super().forward(tokens))


def test_merged_weights_load_into_a_fresh_base_model_with_tied_weights(tmp_path: Path) -> None:
    def adapted() -> Any:
        return peft.get_peft_model(TiedWithABody(), peft.LoraConfig(target_modules=["body"], r=2))

    trainer = train(adapted, tmp_path, PEFTAddon)
    model = TiedWithABody()
    load_model(model, trainer.save_merged(tmp_path / "merged.safetensors"))
    assert torch.allclose(model(TOKENS), trainer.unwrap()(TOKENS), atol=1e-6)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_dtype_that_no_file_holds_is_named_before_the_first_step(tmp_path: Path) -> None:
    class Quantized8(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8))

    with pytest.raises(ConfigError, match=r"cannot hold torch.qint8, the dtype of 'codes'; convert the model"):
        train(Quantized8, tmp_path)
