"""Draws samples for the data ranks of a run, and keeps the place of training in the order of samples.

`holdfast.data` is the public face. The order itself is arithmetic in `base/sampling`. This room never saves or loads:
its objects have a plain `state_dict()`. Read `batches.py` first.
"""
