"""Digits with Lightning: a checkpoint after each epoch, and ``ckpt_path="last"``."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


L.seed_everything(0)
pixels, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
loader = DataLoader(dataset, batch_size=64, shuffle=True)
checkpoint = ModelCheckpoint(dirpath="checkpoints", save_last=True)
trainer = L.Trainer(max_epochs=3, callbacks=[checkpoint], logger=False, enable_progress_bar=False)
trainer.fit(Digits(), loader, ckpt_path="last")
