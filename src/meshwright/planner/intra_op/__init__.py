"""The integer program over factors: for every operator and mesh axis, it chooses one factor to split, or none."""
