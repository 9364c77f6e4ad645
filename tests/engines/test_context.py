"""ContextParallelAddon with models that may be divided, and models that it must refuse; see also test_engines.py."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_engines import on_engine
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention_by_name
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import ENGINES, VOCABULARY, WIDTH, Engine, Task, build, data, distance, net
from kit.rank_tasks import forks
from zae import AddOnConflict, ConfigError, DistributedError, Trainer
from zae.addons import (
    CompileAddon,
    ContextParallelAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    StateManagerAddon,
    TensorParallelAddon,
)

LIMIT = 1e-12
CONTEXT = ENGINES["context"]
on_context = functools.partial(on_engine, names=["context"], default=["context"])
more = functools.partial(on_engine, names=["context"], default=[])
in_shards = functools.partial(on_engine, names=["context-fsdp"], default=[])


def tokens(length: int, rows: int = 8, batch: int = 4) -> DataLoader[Any]:
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(drawn), batch)


def made(**options: Any) -> Engine:
    return Engine((ContextParallelAddon,), 2, 1, options)


class Layer(nn.Module):
    """Embed tokens, let ``mix`` bring positions together, and return logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.mix(self.embed(tokens)))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attend(x: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    made = nn.functional.scaled_dot_product_attention(heads(x), heads(2 * x), heads(x.sin()), mask, **options)
    return made.transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------------------------------- what can be divided


class Both(Layer):
    """Attention to all positions."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + attend(x)


class Positions(Layer):
    """Learnt positions, given or counted, and rotations by them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(128, WIDTH).double()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens) + self.places(positions)
        angle = positions[..., None] * torch.logspace(0, -2, WIDTH // 2, dtype=x.dtype)
        one, two = x.chunk(2, -1)
        x = torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)
        return {"logits": self.head(x + attend(x, is_causal=True)), "unused": None}


class Given(Task):
    """Give the positions, and a loss for each position."""

    def train_step(self, batch: Any) -> Any:
        (rows,) = batch
        places = torch.arange(rows.shape[1] - 1)[None].expand(len(rows), -1)
        out = self.model(rows[:, :-1], positions=places if self.gives else None)
        losses = nn.functional.cross_entropy(out["logits"].transpose(1, 2), rows[:, 1:], reduction="none")
        return {"loss": losses.mean() + 0.01 * self.model.head.weight.square().sum()}  # Also outside of the call.

    gives = True


class Counting(Given):
    gives = False


class Padded(Layer):
    """A mask of keys, which is gathered, and one of queries and keys, of which the rows are divided."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor) -> Any:
        x = self.embed(tokens)
        x = x + attend(x, mask[:, None, None])
        return self.head(x + attend(x, scores))


class Masked(Task):
    def train_step(self, batch: Any) -> Any:
        (rows,) = batch
        inputs, length = rows[:, :-1], rows.shape[1] - 1
        mask = (torch.arange(length) < length - 2) | (inputs > 3)
        scores = -0.1 * (torch.arange(length)[:, None] - torch.arange(length)).abs().double()
        out = self.model(inputs, mask, scores)
        return {"loss": nn.functional.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())}


class Latent(Layer):
    """Whole queries that attend to the sequence, and the sequence to what they found."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.float64))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        found = self.latents.expand(len(x), -1, -1)
        found = found + self.attend(found, x)
        return x + self.attend(x, found) + attend(x, is_causal=True)

    def attend(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        made = nn.functional.scaled_dot_product_attention(heads(x), heads(to), heads(to))
        return made.transpose(1, 2).flatten(2)


class Dropping(Both):
    """Dropout of activations, also in place, and where another dimension is as long as a part."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(super().mix(x), 0.3, self.training, True)
        return x + nn.functional.dropout(x.mean(-1, keepdim=True), 0.5, self.training)


class Losses(Layer):
    """Return a loss for each position."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        x = self.embed(tokens)
        logits = self.head(x + attend(x, is_causal=True))
        return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


class Inside(Task):
    def train_step(self, batch: Any) -> Any:
        losses = self.model(batch[0][:, :-1], batch[0][:, 1:])
        return {"loss": losses.mean(), "num_targets": losses.numel()}


class Torch(Layer):
    """The layers of torch, along dimension 0, without their fast path; and a checkpoint around one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0).double()

    def forward(self, tokens: torch.Tensor, checkpoints: bool = True) -> Any:  # type: ignore[override]
        x = self.layer(self.embed(tokens))
        mix = lambda x: x + attend(x.transpose(0, 1)).transpose(0, 1)  # noqa: E731
        x = torch.utils.checkpoint.checkpoint(mix, x, use_reentrant=False) if checkpoints else mix(x)
        return self.head(x)


class First(Task):
    def train_step(self, batch: Any) -> Any:
        out = self.model(batch[0][:, :-1].T).transpose(0, 1)
        return {"loss": nn.functional.cross_entropy(out.flatten(0, 1), batch[0][:, 1:].flatten())}


EQUAL: dict[str, tuple[type[Layer], type[Trainer], dict[str, Any]]] = {
    "both ways": (Both, Task, {}),
    "given": (Positions, Given, {"context_inputs": ["tokens", "positions"]}),
    "filled in": (Positions, Counting, {"context_positions": "positions"}),
    "masks": (Padded, Masked, {"context_inputs": {"tokens": 1, "mask": 1, "scores": (0, 1)}}),
    "latents": (Latent, Task, {}),
    "dropout": (Dropping, Task, {}),
    "losses": (Losses, Inside, {"context_inputs": ["tokens", "targets"]}),
    "torch": (Torch, First, {"context_inputs": {"tokens": 0}}),
}


@on_context
def test_models_that_can_be_divided(engine: Engine) -> None:
    """Weights, losses and validation are those of one process, with a length that is not divided evenly."""
    train_beside_one_process(engine, 7)


@more
def test_lengths_that_can_be_divided(engine: Engine) -> None:
    """Also shorter than the ranks are many; of 16, a part is as long as the model is wide."""
    train_beside_one_process(engine, 1, 2, 16, 64)


def train_beside_one_process(engine: Engine, *lengths: int) -> None:
    assert dist.get_world_size() == engine.world == 2
    for name, (model, task, options) in EQUAL.items():
        for length in lengths:
            given = {"task": task, "gradient_clip": 0.05}
            trainer = build(made(**options), model=model(), **given)
            single = build(None, model=model(), **given)
            here, there = (each.run(1, tokens(length), tokens(length, 3)) for each in (trainer, single))
            assert here["step"] == 2
            assert distance(trainer, single) < LIMIT, (name, length)
            assert here["valid_metrics_history"][0] == pytest.approx(there["valid_metrics_history"][0], rel=1e-9)


# ---------------------------------------------------------------------------------------------- what is refused


class Convolved(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1).double()

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Gated(Convolved):
    """The same behind a gate that is closed at first: only its gradient shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * super().mix(x)


class Recurrent(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True).double()

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Summed(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class ByHand(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


class ByName(Layer):
    """The function of torch under a name that does not follow."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + attention_by_name(x[:, None], x[:, None], x[:, None])[:, 0]


class Weighted(Layer):
    """Attention that returns its weights does not call the function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Pooled(Layer):
    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.embed(tokens).mean(1))


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Averaged(Layer):
    """A buffer of the mean over positions."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x


class Balanced(Layer):
    """A loss of the model over all positions, beside its outputs."""

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        return self.head(x), x.mean((0, 1)).square().sum()


class Whole(Layer):
    """A causal mask of its own."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + attend(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())


class Noisy(Both):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return super().mix(x) + (torch.randn_like(x) if self.training else 0)


class DroppedScores(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + attend(x, dropout_p=0.5 if self.training else 0.0)


class Long(Layer):
    """Patches of two positions."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.embed(tokens).unflatten(1, (-1, 2)).sum(2))


class Fixed(Layer):
    """Positions that are added to the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(32, WIDTH, dtype=torch.float64))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.places


class Cache:
    def __init__(self, x: torch.Tensor) -> None:
        self.keys = x


class Cached(Layer):
    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        return self.head(x), Cache(x)


class Pairs(Task):
    """Take the mean of what the model returns."""

    def train_step(self, batch: Any) -> Any:
        out = self.model(batch[0][:, :-1])
        out = out[0] if isinstance(out, tuple) else out
        out = out["logits"] if isinstance(out, dict) else out
        return {"loss": out.square().mean()}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


class Penalized(Pairs):
    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        (gradient,) = torch.autograd.grad(loss, [self.parameters[0]], retain_graph=True)
        return {"loss": loss + gradient.square().sum()}


class ByRank(Pairs):
    """Losses that differ between the ranks of a sequence."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": super().train_step(batch)["loss"] * (1 + self.rank)}


class Wide(Layer):
    """Attention to as many other keys as a part has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(20, WIDTH, dtype=torch.float64))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory.expand(len(x), -1, -1)
        return x + nn.functional.scaled_dot_product_attention(x[:, None], memory[:, None], memory[:, None])[:, 0]


MIXES = "is not the same with its sequence divided over 2 ranks: by .* from position"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "convolution": (Convolved, rf"output 0 of Convolved {MIXES} 10 on.* may: conv \(Conv1d\)", {}),
    "closed gate": (Gated, "the gradients of gate in Gated are not the same", {}),
    "recurrence": (Recurrent, rf"{MIXES}.*rnn \(GRU\)", {}),
    "sum": (Summed, MIXES, {}),
    "softmax by hand": (ByHand, rf"{MIXES} 0 on. Only torch.nn.functional.scaled_dot_product_attention", {}),
    "another name": (ByName, f"{MIXES}.*called as an attribute of its module and not imported from it", {}),
    "attention with weights": (Weighted, rf"{MIXES}.*attention \(MultiheadAttention\)", {}),
    "pooling": (Pooled, "output 0 of Pooled is not the same", {}),
    "BatchNorm": (Normed, r"writes into norm.running_mean, norm.running_var what", {}),
    "buffer": (Averaged, "the forward of Averaged writes into mean what depends on the part", {}),
    "a loss of all positions": (Balanced, "output 1 of Balanced is not the same", {}),
    "mask of its own": (Whole, "attn_mask is of 22 queries and 22 keys, and this rank has 22 of the 44 positions.*"
                        "is_causal=True and no attn_mask", {}),
    "counted positions": (Positions, rf"{MIXES} 11 on.*context_positions='position_ids'.*'tokens': 1", {}),
    "noise": (Noisy, "randn_like in the model draws random numbers.*Set its p to 0, or draw in train_step", {}),
    "dropout of attention": (DroppedScores, "dropout_p=0.5 of an attention", {}),
    "patches": (Long, "has 22 entries along dimension 1, and 11 for a part", {}),
    "cache": (Cached, "what Cached returns is a Cache.*use_cache=False", {}),
    "step that differentiates": (Both, "train_step differentiates what the model returned", {"task": Penalized}),
    "losses by rank": (Both, "have computed different losses of it", {"task": ByRank}),
    "not the sequence": (Both, r"shapes \[\(4, 60\)\], of which dimension 2", {"context_inputs": {"tokens": 2}}),
}  # fmt: skip


@on_context
def test_models_that_cannot_be_divided(engine: Engine) -> None:
    """Each is refused at the first batch, on all ranks, by name."""
    assert dist.get_world_size() == engine.world == 2
    for name, (model, message, options) in REFUSED.items():
        trainer = build(engine, model=model(), **{"task": Pairs, **options})
        with pytest.raises(ConfigError) as caught:
            trainer.run(1, tokens(60))
        assert re.search(message, str(caught.value)), (name, str(caught.value))
        assert trainer.progress_checker.step == 0
        assert nn.functional.scaled_dot_product_attention is attention_by_name


@more
def test_what_else_ranks_refuse(engine: Engine) -> None:
    """Errors of the model get a note; batches that differ, and lengths that cannot be told apart."""
    assert dist.get_world_size() == engine.world == 2
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        build(engine, model=Fixed(), task=Pairs).run(1, tokens(32))
    assert any("fails with a part of the sequence" in note for note in caught.value.__notes__)
    rows = torch.full((4, 9), dist.get_rank())
    with pytest.raises(DistributedError, match="another batch than the ranks that divide its sequence"):
        build(engine).run(1, [(rows,)])
    with pytest.raises(ConfigError, match=r"as long as what the model attends to beside the sequence \(20 keys\)"):
        build(engine, model=Wide(), task=Pairs).run(1, [*tokens(60), *tokens(39)])
    with pytest.raises(ConfigError, match="output 0 of Convolved is not the same"):
        build(engine, model=Convolved(), task=Pairs).evaluate(tokens(60))


def test_options_and_add_ons_that_are_refused() -> None:
    """When the class or the trainer is made, with the remedy."""
    for options, message in (
        ({"context_inputs": ["token"]}, r"forward of Net has no parameter 'token'; name one of its parameters: tokens"),
        ({"context_inputs": {"tokens": "1"}}, r"give the parameters of the model's forward that have a sequence"),
        ({"context_inputs": []}, "give the parameters"),
        ({"context_positions": "places"}, "context_positions: the forward of Net has no parameter 'places'"),
        ({"context_attention": "flash"}, "it must be 'gather' or 'ring'"),
        ({"context_attention": "ring"}, "no kernel of attention for CPUs; write context_attention='gather'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(CONTEXT, **options)
    with pytest.raises(AddOnConflict, match=r"CompileAddon.*leave CompileAddon out"):
        Task.add_on(ContextParallelAddon, CompileAddon)
    with pytest.raises(AddOnConflict, match=r"TensorParallelAddon.*write Task.add_on\(FSDPAddon, ContextParallelAddon"):
        Task.add_on(ContextParallelAddon, TensorParallelAddon)
    sharded = Engine((FSDPAddon, ContextParallelAddon))
    with pytest.raises(ConfigError, match="compile_blocks: compiled code"):
        build(sharded, compile_blocks=True)
    both = build(Engine((MultiGPUAddon, ContextParallelAddon)), device=["cpu", "cpu"])
    with pytest.raises(ConfigError, match=r"leaves 1 rank for each sequence; write mesh={'context': 2}"):
        both.plan(1, data())
    compiled = net()
    compiled.blocks[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"blocks\.0 is compiled"):
        build(CONTEXT, model=compiled, device=["cpu", "cpu"]).plan(1, data())


# ---------------------------------------------------------------------------------------------- composed


@in_shards
def test_checkpointed_blocks_in_shards(engine: Engine) -> None:
    """Blocks that are computed again gather keys and values again; sharded over all ranks, in windows of two."""
    options = {"gradient_accumulation_steps": 2, "gradient_clip": 0.05}
    trainer = build(engine, GradientAccumulationAddon, activation_checkpointing=True, **options)
    single = build(None, GradientAccumulationAddon, **options)
    trainer.run(2, data(33), data(9, 2, False))
    single.run(2, data(33, 8), data(9, 2, False))
    assert dist.get_world_size() == engine.world == 4
    assert distance(trainer, single) < LIMIT
    parameter = next(each for each in trainer.unwrap().parameters() if each.dim() > 1)
    assert parameter.device_mesh.size() == 4
    assert parameter.to_local().shape[0] < parameter.shape[0] / 2


def test_one_process_trains_as_without_it() -> None:
    """With one device nothing is divided."""
    trainer, single = build(Engine((ContextParallelAddon,))), build(None)
    assert trainer.run(1, data()) == single.run(1, data())
    assert distance(trainer, single, without="none") == 0


@pytest.mark.exhaustive
def test_processes_that_run_starts(tmp_path: Any) -> None:
    """Two ranks train, save and go on with one; `plan` names what is divided."""
    cls = Task.add_on(ContextParallelAddon, StateManagerAddon)

    def run(name: str, devices: Any, **options: Any) -> Any:
        trainer = cls(net(), devices, optimizer=torch.optim.SGD, log_bar=False, seed=0, save_path=tmp_path / name,
                      save_every=2, **options)  # fmt: skip
        with forks():
            trainer.run(2, tokens(9, 16), **({"max_steps": 4} if "resume" not in options else {}))
        return trainer

    begun = run("begun", ["cpu", "cpu"])
    assert "sequences divided over 2 ranks: tokens (dimension 1)" in str(begun.plan(1, tokens(9)))
    alone = run("alone", "cpu", resume=str(tmp_path / "begun"))
    single = build(None, optimizer=torch.optim.SGD)
    single.run(2, tokens(9, 16))
    assert alone.progress_checker.step == single.progress_checker.step == 8
    assert distance(alone, single) < LIMIT


class Wider(nn.Module):
    """Four blocks of a usual size, and a loss for each position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(8))
        self.ins, self.outs = (nn.ModuleList(nn.Linear(*size) for _ in range(4)) for size in ((128, 384), (128, 128)))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*size) for _ in range(4)) for size in ((128, 512), (512, 128)))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in range(4):
            query, key, value = map(heads, self.ins[index](self.norms[index](x)).chunk(3, -1))
            found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.outs[index](found.transpose(1, 2).flatten(2))
            x = x + self.downs[index](nn.functional.gelu(self.ups[index](self.norms[4 + index](x))))
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), targets, reduction="none")


class Measured(Inside):
    """Count the bytes that a forward keeps for its backward."""

    def train_step(self, batch: Any) -> Any:
        weights = {each.untyped_storage().data_ptr() for each in self.unwrap().parameters()}
        held = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            found = super().train_step(batch)
        self.held = sum(held.values())
        return found


@more
def test_a_rank_keeps_about_half_of_the_activations(engine: Engine) -> None:
    """And the keys and values of the other half."""
    assert dist.get_world_size() == engine.world == 2
    both = [build(each, model=Wider(), task=Measured, optimizer=torch.optim.SGD)
            for each in (made(context_inputs=["tokens", "targets"]), None)]  # fmt: skip
    for trainer in both:
        trainer.run(1, tokens(1024))  # Two steps: the check is in the first.
    assert abs(both[0].held / both[1].held - 0.60) < 0.01, (both[0].held, both[1].held)  # As context_parallel.md says.
    assert distance(*both, without="none") < 1e-6
