"""Real trainings with the real frameworks, which `make integrations` runs: killed in a save, resumed, measured."""
