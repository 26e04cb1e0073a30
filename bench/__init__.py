"""Holdfast side by side with its rivals and with the hardware, in one run. Only ratios count.

`python -m bench` runs its parts one after the other, each in its own processes, and writes
`bench/results/latest.json`. Rounds are interleaved (ours, theirs, ours, …) and take turns at who goes first; each key
is the median over rounds of that round's ratio, with the lowest and highest beside it.

A part is one question: `large`, `stall`, `lazy`, `training`, `tiny`, `tiny_dtensor`, `memory`. `goals` has the
goal and the floor of each key. `limits` and `rivals` have what Holdfast is compared with.
"""
