"""Choose a layout: what an iteration takes in time and memory on a cluster, and the best way."""
