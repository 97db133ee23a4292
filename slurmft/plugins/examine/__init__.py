"""Examines a cluster: checks on the login node and on nodes, with hints what to do."""
