"""Fits: the libraries of Hugging Face, each with a tiny configuration and nothing downloaded."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from kit import hand
from zae import Trainer
from zae.addons import StateManagerAddon

ROWS = torch.randint(0, 32, (24, 9), generator=torch.Generator().manual_seed(1))


class Language(Trainer):
    """A model of transformers computes its loss itself."""

    def train_step(self, batch):
        return {"loss": self.model(**batch).loss}

    test_step = train_step


def tiny_gpt2():
    """A GPT-2 of one layer, with the same weights at each call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, use_cache=False
        )
    )


def train_by_hand(model, optimizer, batches, scheduler=None, n_epoch=2):
    """The loop that each fit is compared with."""
    model.train()
    for _ in range(n_epoch):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    return hand.digest(model)


def test_transformers_with_its_collator_and_schedule():
    """A model, a data collator and a schedule of transformers, bitwise the loop by hand."""
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    # begin: transformers
    from transformers import default_data_collator, get_linear_schedule_with_warmup

    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 12)
    trainer = Language(
        model, "cpu", optimizer=optimizer, scheduler=scheduler, scheduler_step_on_batch=True
    )
    torch.manual_seed(0)
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=default_data_collator)
    trainer.run(2, loader)
    # end
    expected = tiny_gpt2()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 12)
    torch.manual_seed(0)
    assert hand.digest(model) == train_by_hand(expected, optimizer, loader, schedule)


def test_datasets_resume_in_mid_epoch(tmp_path):
    """A mapped and formatted dataset in a DataLoader: dicts of tensors; a second run resumes within the epoch."""
    # begin: datasets
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": ROWS.tolist()})
    rows = rows.map(lambda row: {"labels": row["input_ids"]}).with_format("torch")
    Task = Language.add_on(StateManagerAddon)  # noqa: N806
    options = {"save_path": tmp_path / "run", "save_every": 1, "resume": "auto", "seed": 0}
    # The first call stops in mid-epoch; the second one is a new trainer.
    for limit in (4, None):
        trainer = Task(tiny_gpt2, "cpu", optimizer=torch.optim.AdamW, **options)
        trainer.run(2, DataLoader(rows, batch_size=4, shuffle=True), max_steps=limit)
    # end
    whole = Task(
        tiny_gpt2,
        "cpu",
        optimizer=torch.optim.AdamW,
        **options | {"save_path": tmp_path / "whole"},
    )
    whole.run(2, DataLoader(rows, batch_size=4, shuffle=True))
    assert trainer.progress_checker.step == 12
    assert hand.digest(trainer.unwrap()) == hand.digest(whole.unwrap())


def test_peft_trains_its_adapter():
    """`get_peft_model` is a module like any other: the base stays, and the adapter is bitwise that of the loop."""
    batches = [{"input_ids": rows, "labels": rows} for rows in ROWS.split(4)]

    def adapted():
        # begin: peft
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            tiny_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        trainer = Language(model, "cpu", optimizer=torch.optim.AdamW(trained, lr=1e-2))
        # end
        return model, trainer, trained

    model, trainer, _ = adapted()
    torch.manual_seed(7)
    trainer.run(2, batches)
    expected, _, trained = adapted()
    torch.manual_seed(7)
    assert hand.digest(model) == train_by_hand(
        expected, torch.optim.AdamW(trained, lr=1e-2), batches
    )
    base, before = model.unload(), tiny_gpt2()
    assert hand.digest(base) == hand.digest(before)


def test_accelerate_prepares_the_loader():
    """A loader of `Accelerator.prepare` is an iterable like any other, bitwise the loop that accelerate trains."""
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    # begin: accelerate
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(rows, batch_size=4, shuffle=True))
    model = tiny_gpt2()
    trainer = Language(
        model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    torch.manual_seed(0)
    trainer.run(2, loader)
    # end
    expected = tiny_gpt2()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    loader = accelerator.prepare(DataLoader(rows, batch_size=4, shuffle=True))
    torch.manual_seed(0)
    assert hand.digest(model) == train_by_hand(expected, optimizer, loader)
