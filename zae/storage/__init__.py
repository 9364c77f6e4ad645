"""One checkpoint on disk: write it, verify it, read it.

`checkpoint` writes, lists and reads them: each rank its share, and a process alone all of it; and weights alone. Below
it, `manifest` describes a checkpoint; `encoding` turns a nested state into JSON and tensors; `weights_file` reads and
writes files of tensors, `tensor_bytes` their bytes; `filesystem` has the names on the disk, and makes every change of
it.
"""
