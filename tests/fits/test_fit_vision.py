"""Fits: timm, whose torchvision has to be built for the installed torch; it has a marker of its own therefore."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from kit import hand
from zae import Trainer
from zae.addons import StateManagerAddon


class Classifier(Trainer):
    """A classifier of images."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    test_step = train_step


@pytest.mark.vision
def test_timm_resumes_in_mid_epoch(tmp_path):
    """A small vision transformer and LAMB with its groups, bitwise the loop by hand, also after a resume."""
    images = [
        (
            torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(n)),
            torch.arange(4),
        )
        for n in range(3)
    ]
    # The first run stops within the first epoch, the second one resumes it.
    for limit in (2, None):
        # begin: timm
        import timm
        from timm.optim import create_optimizer_v2

        torch.manual_seed(0)
        model = timm.create_model("test_vit", pretrained=False, num_classes=4, img_size=32)
        optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-2, weight_decay=0.05)
        Task = Classifier.add_on(StateManagerAddon)  # noqa: N806
        trainer = Task(
            model,
            "cpu",
            optimizer=optimizer,
            save_path=tmp_path,
            save_every=1,
            resume="auto",
        )
        trainer.run(2, images, max_steps=limit)
        # end
    torch.manual_seed(0)
    expected = timm.create_model("test_vit", pretrained=False, num_classes=4, img_size=32)
    optimizer = create_optimizer_v2(expected, opt="lamb", lr=1e-2, weight_decay=0.05)
    for _ in range(2):
        for inputs, targets in images:
            optimizer.zero_grad()
            cross_entropy(expected(inputs), targets).backward()
            optimizer.step()
    assert trainer.progress_checker.step == 6
    assert hand.digest(model) == hand.digest(expected)
