"""Digits with skorch: ``Checkpoint`` after each epoch, and ``LoadInitState``.

``--rest`` fits for the epochs that are missing of three, with ``load_params`` and ``partial_fit``.
"""

import argparse
import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, LoadInitState
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rest", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32)
    checkpoint = Checkpoint(dirname="checkpoints", monitor=None)
    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=3e-3,
        batch_size=64,
        max_epochs=3,
        iterator_train__shuffle=True,
        callbacks=[checkpoint] if args.rest else [checkpoint, LoadInitState(checkpoint)],
    )
    if not args.rest:
        net.fit(pixels, labels)
        return
    net.initialize()
    if os.path.exists("checkpoints/history.json"):
        net.load_params(checkpoint=checkpoint)
    net.partial_fit(pixels, labels, epochs=3 - len(net.history))


if __name__ == "__main__":
    main()
