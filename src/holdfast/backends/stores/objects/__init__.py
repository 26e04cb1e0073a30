"""Object stores behind `s3://`, `gs://` and `az://`, over the library `obstore`. Read `store.py` first.

Every object is one request that stores it whole or not at all. Nothing here retries: a wrapper around a store does.
The library, its clients and credentials are loaded at the first request, never at import.
"""
