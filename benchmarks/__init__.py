"""Benchmarks, one module a question; each writes results, and the command that makes them, to results/."""
