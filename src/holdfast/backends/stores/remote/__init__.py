"""What the stores over a network share: memory of uploads, requests for ranges, the probe, and texts that may be shown.

`objects/` and `fsspec/` use it; read `probe.py` first. It never makes a request by itself, and never knows which client
library does.
"""
