"""The order of samples, their shares among ranks, and the place of training in that order: pure arithmetic.

`backends/torch/data` asks for the samples of a rank. This room never reads a data set, and knows no process group and
no loader. Read `order.py` first.
"""
