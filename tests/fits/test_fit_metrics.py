"""Fits: torchmetrics and scikit-learn, for the metrics and for what comes before and after a network."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from kit import hand
from zae import Trainer


def test_torchmetrics_over_an_epoch():
    """A metric that is not a mean of batches: updated in `test_step`, computed once in `metric_on_epoch_end`."""
    # begin: torchmetrics
    from torchmetrics.classification import MulticlassF1Score

    class Classifier(Trainer):
        f1 = MulticlassF1Score(num_classes=2)

        def train_step(self, batch):
            inputs, targets = batch
            return {"loss": cross_entropy(self.model(inputs), targets)}

        def test_step(self, batch):
            self.f1.update(self.model(batch[0]), batch[1])
            return self.train_step(batch)

        def metric_on_epoch_end(self):
            if self.mode == "train":
                return {}
            value = float(self.f1.compute())
            self.f1.reset()
            return {"f1": value}

    # end

    from sklearn.metrics import f1_score

    network, valid = hand.network(), hand.loader(30, shuffle=False, seed=5)
    trainer = Classifier(
        network,
        "cpu",
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        monitor="f1",
    )
    found = trainer.run(2, hand.loader(), valid)
    network.eval()
    guessed = network(valid.dataset.tensors[0]).argmax(1)
    expected = f1_score(valid.dataset.tensors[1], guessed, average="macro")
    assert np.isclose(found["valid_metrics_history"][-1]["f1"], expected, atol=1e-6)
    assert np.isclose(trainer.evaluate(valid)["f1"], expected, atol=1e-6)
    assert trainer.f1.update_count == 0


def test_a_network_inside_a_pipeline_of_sklearn():
    """`predict` as a step of a pipeline: scaled inputs go in, and a classifier of sklearn is fitted to the features."""
    from sklearn.datasets import load_digits

    class Autoencoder(Trainer):
        def train_step(self, batch):
            return {"loss": (self.model(batch[0]) - batch[0]).square().mean()}

        test_step = train_step

        def predict_step(self, batch):
            return self.model[0](batch[0])

    pixels, labels = load_digits(return_X_y=True)
    network = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 64))
    trainer = Autoencoder(
        network, "cpu", optimizer=torch.optim.Adam(network.parameters(), lr=1e-2)
    )
    # begin: scikit-learn
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, MinMaxScaler
    from torch.utils.data import DataLoader, TensorDataset

    def batches(rows):
        return DataLoader(
            TensorDataset(torch.tensor(rows, dtype=torch.float32)), batch_size=64
        )

    scaler = MinMaxScaler().fit(pixels[:900])
    trainer.run(3, batches(scaler.transform(pixels[:900])))
    encode = FunctionTransformer(
        lambda rows: trainer.predict(batches(rows))["output"].numpy()
    )
    pipeline = make_pipeline(scaler, encode, LogisticRegression(max_iter=1000))
    score = pipeline.fit(pixels[:900], labels[:900]).score(pixels[900:], labels[900:])
    # end
    network.eval()
    with torch.no_grad():
        features = network[0](
            torch.tensor(scaler.transform(pixels), dtype=torch.float32)
        ).numpy()
    alone = LogisticRegression(max_iter=1000).fit(features[:900], labels[:900])
    assert abs(score - alone.score(features[900:], labels[900:])) < 0.01
    assert score > 0.7
