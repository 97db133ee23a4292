"""`slurmft completion`."""
