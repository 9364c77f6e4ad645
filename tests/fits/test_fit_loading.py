"""Fits: torchdata's stateful loader, and streams of webdataset."""

from __future__ import annotations

import io
import tarfile

import pytest
import torch
from torch.nn.functional import cross_entropy

from kit import hand
from zae import Trainer
from zae.addons import StateManagerAddon


class Classifier(Trainer):
    """A classifier of two classes."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    test_step = train_step


def train_by_hand(n_epoch, batches):
    """The loop that each fit is compared with."""
    model = hand.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(n_epoch):
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return hand.digest(model)


def test_torchdata_resumes_in_mid_epoch(tmp_path):
    """A `StatefulDataLoader` with two workers: a new trainer and loader continue the epoch, bitwise."""
    # begin: torchdata
    from torchdata.stateful_dataloader import StatefulDataLoader

    Task = Classifier.add_on(StateManagerAddon)  # noqa: N806
    # The first call stops in mid-epoch; the second one is a new trainer and loader.
    for limit in (4, None):
        torch.manual_seed(0 if limit else 99)
        loader = StatefulDataLoader(hand.data(), batch_size=4, shuffle=True, num_workers=2)
        trainer = Task(
            hand.network(),
            "cpu",
            optimizer=sgd,
            save_path=tmp_path,
            save_every=1,
            resume="auto",
        )
        trainer.run(2, loader, max_steps=limit)
    # end
    torch.manual_seed(0)
    loader = StatefulDataLoader(hand.data(), batch_size=4, shuffle=True, num_workers=2)
    assert trainer.progress_checker.step == 12
    assert hand.digest(trainer.unwrap()) == train_by_hand(2, loader)


def sgd(parameters):
    """Make the optimizer of the loop by hand."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.fits
def test_webdataset_streams_shards(tmp_path):
    """Shards read as a stream without a length, bitwise the loop by hand. A `WebLoader` does the same."""
    for shard in range(2):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as archive:
            for row, (inputs, target) in enumerate(hand.data(12, seed=shard)):
                for suffix, value in (("inputs.pth", inputs), ("cls", target)):
                    file = io.BytesIO()
                    torch.save(value, file) if suffix != "cls" else file.write(
                        str(int(value)).encode()
                    )
                    info = tarfile.TarInfo(f"{row:03}.{suffix}")
                    info.size = file.tell()
                    file.seek(0)
                    archive.addfile(info, file)
    folder, model = tmp_path, hand.network()
    # begin: webdataset
    import webdataset

    shards = webdataset.WebDataset(f"{folder}/part-{{0..1}}.tar", shardshuffle=False)
    stream = shards.decode().to_tuple("inputs.pth", "cls").batched(4)
    loader = torch.utils.data.DataLoader(stream, batch_size=None)
    trainer = Classifier(model, "cpu", optimizer=sgd)
    torch.manual_seed(0)
    trainer.run(2, loader)
    # end
    torch.manual_seed(0)
    assert trainer.progress_checker.step == 12
    assert hand.digest(model) == train_by_hand(2, loader)
    model = hand.network()
    torch.manual_seed(0)
    Classifier(model, "cpu", optimizer=sgd).run(
        2, webdataset.WebLoader(stream, batch_size=None)
    )
    torch.manual_seed(0)
    assert hand.digest(model) == train_by_hand(2, loader)
