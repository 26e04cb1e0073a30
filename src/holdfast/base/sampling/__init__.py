"""The order of samples, their shares, and the place of training in them: pure arithmetic.

`order.py` says which sample stands at a place of an epoch, `shares.py` which places a data rank reads, `position.py`
which places come next, and `mixture.py` which source serves a place. Data sets, ranks and loaders are not known here.
"""
