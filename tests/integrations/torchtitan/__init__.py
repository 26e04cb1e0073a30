"""torchtitan under the rig of `make integrations`: its Llama 3 debug model, trained on CPUs."""
