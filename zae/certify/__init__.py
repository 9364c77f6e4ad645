"""Prove the promises of zae for the trainer of a script, by short runs."""
