"""Is the cluster well? Checks from the login node and on the nodes, and what follows from them."""
