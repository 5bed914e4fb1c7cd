"""Implementations of codecs: pure functions that encode, decode and merge flat buffers, and the state that they keep
between steps."""
