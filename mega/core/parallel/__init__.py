"""HOW ranks share the work: the mesh, its collectives, and the layers and schedules built on them."""
