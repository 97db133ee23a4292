"""Where jobs run: Slurm, this machine, containers; submit, wait, status, cleanup."""
