"""Destinations of the records of a run.

`base` has Sink and JSONLSink; `worker` calls a sink in a thread with a deadline; `redact` removes secrets.
"""
