"""The simulator: plays a step's schedule with its predicted costs, without running the model."""
