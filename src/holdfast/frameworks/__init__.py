"""Tensor frameworks: what turns a state into shards and gives it back, and how its ranks talk.

One folder per framework; each sees ports, spec, settings and errors only.
"""
