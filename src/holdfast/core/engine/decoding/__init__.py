"""Stored chunks become raw ones here, in memory of the thread that asks.

Read `decode.py` first: reads and exchanges place what it returns. `chunk_reader.py` reads chunks one by one, for
whoever verifies, copies, proves or rebuilds whole packs. It never places anything, and never decides what is read; what
the stored bytes mean is in `core/format/coded_chunks.py`.
"""
