"""Truth on storage: what a checkpoint's files hold, and which of them count.

Here live the formats of manifest, index, parts and packs, publishing, the catalog of a run, collect and verify.
Moving tensor bytes is the engine's work; deciding what to move is the plan's.
"""
