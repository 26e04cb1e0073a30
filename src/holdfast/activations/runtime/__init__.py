"""The runtime: traces units, and treats the tensors that autograd saves in their calls.

Read `attach.py` first: a fit traces units there, and puts columns to work. `replay.py` runs a column in backward.
Only this folder of the room imports torch, and nothing here solves.
"""
