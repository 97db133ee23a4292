"""The commands for Kubernetes: one module each."""
