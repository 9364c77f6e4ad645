"""One checkpoint on disk: write it, verify it, read it.

`files` writes, lists and reads checkpoints; `manifest` is the file that describes one; `encoding` turns a
nested state into JSON and tensors, with `columns` and `strict_json`; `tensor_files` reads and writes
safetensors and ckpt files; `hashed_io` hashes bytes as they pass; `names` and `locks` are what they say.
"""
