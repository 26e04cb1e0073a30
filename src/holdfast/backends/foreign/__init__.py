"""Other systems' checkpoints: readers list their tensors in place, writers lay their files out.

`wiring` picks them; `stored/checkpoint/` and `offline/` use them through `base/ports/foreign.py`.
Each folder is one system. Read `huggingface/` first, the smallest one.
Nothing in a foreign file is ever executed.
"""
