"""Stored chunks become raw ones here: of reads that place them, and for whoever checks or copies whole packs."""
