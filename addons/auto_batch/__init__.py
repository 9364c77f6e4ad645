"""Out of memory: split a batch that does not fit, and train on the parts."""
