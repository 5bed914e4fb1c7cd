"""Emulated devices and networks, for tests and benchmarks of hardware that this machine does not have."""
