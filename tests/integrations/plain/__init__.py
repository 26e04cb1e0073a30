"""A training without a framework, by which the rig itself is tried."""
