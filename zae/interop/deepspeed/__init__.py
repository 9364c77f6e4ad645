"""DeepSpeed: read its configuration, and give its engine whole tensors and take them from it."""
