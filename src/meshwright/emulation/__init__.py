"""Emulated devices and networks, for tests and benchmarks of what this machine does not have. Training does without."""
