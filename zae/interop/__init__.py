"""What code of other libraries needs to run here: arguments, callbacks, datasets, models and modules."""
