"""The one idea: boxes, flat ranges, placements, meshes and dtypes, as pure arithmetic.

Every room above imports them. Read `box.py` first, then `region.py` and `placement.py`.
Nothing here imports torch, touches storage or knows a checkpoint.
"""
