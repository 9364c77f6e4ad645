"""What CompileAddon needs.

`graphs` checks what can be compiled; `fused` puts the whole step into one graph; `trial` measures which way is
the fastest.
"""
