"""The simulator: plays a step's schedule with its costs, without running anything."""
