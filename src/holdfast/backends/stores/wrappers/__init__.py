"""Wrappers around any store over a network: retries, time limits, adaptive concurrency, a cap on the bandwidth.

`wiring` puts them around a store whose `TemporaryError` says what may succeed later. Read `retrying.py` first.
A wrapper never knows which store is below, and no store below tries again by itself.
"""
