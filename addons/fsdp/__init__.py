"""FSDP2: parameters, gradients and optimizer states in parts on several devices."""
