"""A character-level transformer on the text of Python's help pages: in two stages, and
resumed in four.

python examples/pipeline.py
"""

from functools import partial
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import PipelineAddon, StateManagerAddon

LENGTH, WIDTH = 64, 64
TEXT = "".join(topics[name] for name in sorted(topics))[:60_000]
CHARACTERS = sorted(set(TEXT))


class Transformer(nn.Sequential):
    """Predict the next character; a stage may begin with each of its parts."""

    def __init__(self):
        layers = (
            nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=256, batch_first=True)
            for _ in range(4)
        )
        super().__init__(
            nn.Embedding(len(CHARACTERS), WIDTH),
            *layers,
            nn.Linear(WIDTH, len(CHARACTERS)),
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(LENGTH)
        )

    def forward(self, tokens):
        x = self[0](tokens)
        for layer in list(self)[1:-1]:
            x = layer(x, self.mask, is_causal=True)
        return self[-1](x)


class Characters(Trainer):
    def train_step(self, batch):
        logits = self.model(batch[0][:, :-1])
        return {
            "loss": nn.functional.cross_entropy(
                logits.flatten(0, 1), batch[0][:, 1:].flatten()
            )
        }

    test_step = train_step


def train(n_epoch, stages, schedule, **options):
    """Train until this epoch on two devices, in micro-batches of 12 rows."""
    rows = torch.tensor([CHARACTERS.index(each) for each in TEXT]).split(LENGTH + 1)[
        :-1
    ]
    data = (
        TensorDataset(torch.stack(rows[:-150])),
        TensorDataset(torch.stack(rows[-150:])),
    )
    loader, test = (DataLoader(each, 48, shuffle=True) for each in data)
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    trainer = Characters.add_on(PipelineAddon, StateManagerAddon)(
        *(Transformer, devices),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        gradient_clip=1.0,
        seed=0,
        split=stages,
        pipeline_schedule=schedule,
        pipeline_microbatches=4,
        save_path="runs/pipeline",
        **options,
    )
    loss = trainer.run(n_epoch, loader, test)["valid_metrics_history"][-1]["valid_loss"]
    print(
        f"epoch {n_epoch} in {stages} stages, {schedule}: validation loss {loss:.3f}, "
        f"saved in {trainer.last_path}"
    )


if __name__ == "__main__":
    train(1, 2, "1F1B", overwrite=True)
    train(2, 4, "ZBVZeroBubble", resume=True)
