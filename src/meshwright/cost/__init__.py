"""The costs of a step: compute, communication and memory in closed form, without running it."""
