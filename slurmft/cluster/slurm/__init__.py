"""Jobs on Slurm: its commands, allocations, batch scripts and job arrays."""
