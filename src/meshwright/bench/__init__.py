"""``meshwright bench``: measures scaling and utilization of a machine, and refuses results that mislead."""
