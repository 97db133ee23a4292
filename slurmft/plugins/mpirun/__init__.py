"""Jobs by mpirun, on the hosts of a file: the launcher, and the task of each rank."""
