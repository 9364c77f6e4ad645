"""Where the records of a run go.

`base` has Sink and JSONLSink; `worker` calls a sink in a thread with a deadline; `redact` removes secrets.
"""
