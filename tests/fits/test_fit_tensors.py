"""Fits: monai, einops, tensordict and torch_geometric, whose batches or models are not plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from kit import hand
from zae import Trainer
from zae.addons import StateManagerAddon


@pytest.mark.fits
def test_monai_segments_images():
    """A U-Net, the Dice loss, and a Dice metric over an epoch, with batches that are dicts of `MetaTensor`."""
    rows = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    files = [{"image": row, "label": (row > 0.5).float()} for row in rows]
    # begin: monai
    from monai.data import DataLoader, Dataset
    from monai.losses import DiceLoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet
    from monai.transforms import Compose, EnsureTyped, ScaleIntensityd

    class Segmentation(Trainer):
        dice = DiceMetric(include_background=True)

        def train_step(self, batch):
            return {
                "loss": DiceLoss(sigmoid=True)(self.model(batch["image"]), batch["label"])
            }

        def test_step(self, batch):
            self.dice(self.model(batch["image"]).sigmoid() > 0.5, batch["label"])
            return self.train_step(batch)

        def metric_on_epoch_end(self):
            if self.mode == "train":
                return {}
            value = self.dice.aggregate().item()
            self.dice.reset()
            return {"dice": value}

    transforms = Compose(
        [EnsureTyped(("image", "label"), track_meta=True), ScaleIntensityd("image")]
    )
    loader = DataLoader(Dataset(files, transforms), batch_size=4, shuffle=True)
    # end

    def network():
        torch.manual_seed(5)
        return UNet(2, 1, 1, channels=(4, 8), strides=(2,))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    model, expected = network(), network()
    trainer = Segmentation(model, "cpu", optimizer=sgd)
    torch.manual_seed(0)
    found = trainer.run(3, loader, loader)
    optimizer, loss = sgd(expected.parameters()), DiceLoss(sigmoid=True)
    torch.manual_seed(0)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss(expected(batch["image"]), batch["label"]).backward()
            optimizer.step()
    assert hand.digest(model) == hand.digest(expected)
    assert 0 < found["valid_metrics_history"][-1]["dice"] <= 1


class Classifier(Trainer):
    """A classifier of two classes."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    test_step = train_step


@pytest.mark.fits
def test_einops_layers(tmp_path):
    """Layers of einops in a module; the weights of a checkpoint are those in memory."""
    images = [(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))] * 3
    # begin: einops
    from einops.layers.torch import Rearrange, Reduce

    model = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4),
        nn.Linear(16, 2),
        Reduce("b n c -> b c", "mean"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Classifier.add_on(StateManagerAddon)(
        model, "cpu", optimizer=optimizer, save_path=tmp_path
    )
    trainer.run(2, images)
    # end
    weights = torch.load(trainer.save_model(tmp_path / "model.pt"))
    assert weights.keys() == model.state_dict().keys()
    assert all(
        torch.equal(weights[name], value) for name, value in model.state_dict().items()
    )


@pytest.mark.fits
def test_tensordict_is_a_batch():
    """A `TensorDict` is moved to the device and weighted by its samples; the model is a `TensorDictModule`."""
    # begin: tensordict
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    class Regression(Trainer):
        def train_step(self, batch):
            return {"loss": mse_loss(self.model(batch)["output"], batch["target"])}

        test_step = train_step

    rows = TensorDict(
        {"input": torch.rand(10, 4), "target": torch.rand(10, 1)}, batch_size=[10]
    )
    model = TensorDictModule(nn.Linear(4, 1), in_keys=["input"], out_keys=["output"])
    trainer = Regression(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    trainer.run(2, rows.split(4))
    # end
    with torch.no_grad():
        mean = mse_loss(model.module(rows["input"]), rows["target"])
    assert trainer.progress_checker.step == 6
    assert trainer.evaluate(rows.split(4))["loss"] == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.fits
def test_torch_geometric_batches_of_graphs():
    """Batches of graphs of different sizes; `num_targets` says how many graphs the loss is the mean over."""
    generator = torch.Generator().manual_seed(2)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    # begin: torch_geometric
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.head = GCNConv(3, 8), nn.Linear(8, 2)

        def forward(self, batch):
            return self.head(
                global_mean_pool(
                    self.convolution(batch.x, batch.edge_index).relu(), batch.batch
                )
            )

    class Task(Trainer):
        def train_step(self, batch):
            return {
                "loss": cross_entropy(self.model(batch), batch.y),
                "num_targets": batch.num_graphs,
            }

        test_step = train_step

    graphs = [
        Data(torch.rand(3 + n, 3, generator=generator), edges, y=torch.tensor([n % 2]))
        for n in range(10)
    ]
    model = Graphs()
    trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.run(2, DataLoader(graphs, batch_size=4, shuffle=True))
    # end
    whole = next(iter(DataLoader(graphs, batch_size=10)))
    with torch.no_grad():
        mean = cross_entropy(model(whole), whole.y)
    assert trainer.progress_checker.step == 6
    assert trainer.evaluate(DataLoader(graphs, batch_size=4))["loss"] == pytest.approx(
        float(mean), rel=1e-5
    )
