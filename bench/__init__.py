"""Holdfast side by side with PyTorch's own distributed checkpoint, in one run: only ratios count.

`python -m bench` writes `bench/results/latest.json`. Rounds are interleaved (ours, theirs, ours, …); each key
is the median over rounds of that round's ratio, with the lowest and highest beside it.
"""
