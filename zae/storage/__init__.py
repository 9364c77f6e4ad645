"""One checkpoint on disk: write it, verify it, read it.

`share` writes checkpoints, each rank its share and a process alone all of it, and weights alone. `checkpoint` lists and
reads them; `parts` reads what several ranks have written. Below them, `manifest` describes a
checkpoint; `encoding` turns a nested state into JSON and tensors; `weights_file` reads and writes files of tensors,
`tensor_bytes` their bytes; `hashed_io` hashes bytes as they pass; `filesystem` makes every change of the disk.
"""
