"""The Trainer of Transformers: its arguments, data, evaluation and Hub."""
