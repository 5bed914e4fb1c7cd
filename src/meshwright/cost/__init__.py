"""What a step costs: compute, communication and memory in closed form, without running anything."""
