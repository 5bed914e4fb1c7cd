"""Codecs at work: pure functions that encode, decode and merge flat buffers, and what they keep between steps."""
