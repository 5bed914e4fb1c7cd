"""The tests: pure, distributed, end_to_end, gpu, golden. A package, so that ranks can import test functions by name."""
