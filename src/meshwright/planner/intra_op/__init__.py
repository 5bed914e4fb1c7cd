"""The integer program over factors: for every operator one factor, or none, for each axis of the mesh."""
