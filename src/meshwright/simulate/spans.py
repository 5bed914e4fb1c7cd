"""The spans of a simulated rank, and the streams on which they lie."""

from meshwright.ir.schedule import Action

COMPUTE, COMMUNICATION, WAIT, HOST = "compute", "communication", "wait", "host"
"""Streams of a trace: computing; communication between ranks; the time that computing waits for communication; and time
of the host in which the device is idle."""
OUTSIDE = "data, logging, waiting for the loss"
"""The name of the span of ``Software.step_s``."""

PlayedSpan = tuple[str, str | Action, float, float, int, float]
"""(stream, name, start, end, bytes, flops)."""
