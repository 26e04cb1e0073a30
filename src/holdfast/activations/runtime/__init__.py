"""The runtime: traces units, and treats the tensors that autograd saves in their calls.

`trace.py` describes one call of a unit, `attach.py` puts a column to work: read them in this order.
Only this folder of the room imports torch, and nothing here solves.
"""
