"""Draws samples for the data ranks of a run, and keeps the place of training in the order of samples.

`batches.py` is a batch sampler for any loader, `loader.py` a loader with steps and exact weights. The order itself is
arithmetic in `base/sampling`. Saves and loads know the `state_dict()` of both, and three refusals.
"""
