"""Our format, encode and decode: manifest, index, packs, values. Bytes in, frozen values out.

`docs/format.md` is its contract. `stored/`, `training/saving/` and `training/loading/` call it.
Read `manifest.py` first, then `index/`.
Nothing here touches a store, a clock or a thread.
"""
