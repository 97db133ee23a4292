"""Where jobs run: Slurm, this machine, mpirun, Kubernetes; submit, wait, status, cleanup."""
