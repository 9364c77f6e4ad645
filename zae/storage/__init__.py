"""One checkpoint on disk: write it, verify it, read it.

`checkpoint` writes, reads and lists checkpoints, and weights alone; `manifest` describes one; `encoding` turns a nested
state into JSON and tensors; `weights_file` reads and writes files of tensors, `tensor_bytes` their bytes; `hashed_io`
hashes bytes as they pass; `filesystem` makes every change of the disk. Where each rank saves its parts, `sharded`
writes them and `parts` reads them.
"""
