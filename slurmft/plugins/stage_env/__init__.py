"""A Python environment copied to each node's own disk."""
