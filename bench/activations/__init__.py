"""Training within a budget of memory beside plain training and its rivals: `python -m bench.activations`."""
