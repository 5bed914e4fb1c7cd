"""Benchmarks, one module a question; each writes its results, and the command that makes them, to benchmarks/results."""
