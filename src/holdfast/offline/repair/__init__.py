"""Repair: manifests and indexes rebuilt where digests prove them.

`api` and `holdfast repair` call it. Read `repair.py` first.
It never changes a file in place, and keeps what it replaces.
"""
