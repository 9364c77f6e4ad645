"""DeepSpeed ZeRO as the engine of a trainer."""
