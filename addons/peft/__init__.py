"""LoRA and other adapters of PEFT."""
