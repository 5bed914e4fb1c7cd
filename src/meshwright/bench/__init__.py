"""``meshwright bench``: measure scaling and utilization of a machine, and refuse results that mislead."""
