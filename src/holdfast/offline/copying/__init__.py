"""Copies runs and single checkpoints from one store to another: what manifests name, proven by its digests on the way.

`offline_api` calls it. Read `copy_run.py` first; the files themselves are copied by `stored/copying/`.
It never publishes a manifest before every file that it names is there, and never stores bytes that a digest refutes.
"""
