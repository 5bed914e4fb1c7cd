"""Data: the order of samples, where they are kept, and how they are fetched before a step needs them."""
