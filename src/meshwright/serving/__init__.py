"""Workflows of models on tiers of workers: planned, simulated, run with PyTorch models, and measured."""
