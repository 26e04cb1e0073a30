"""Words, arithmetic and protocols: the clock, values that rooms exchange, boxes and meshes, the ports of a backend.

Every other folder imports this one. Read `ports/` first.
Nothing here reads a file, starts a thread or knows an implementation.
"""
