"""What holds on GPUs: tests, parity, speed beside PyTorch, and predictions beside measurements. Run as ``make gpu``."""
