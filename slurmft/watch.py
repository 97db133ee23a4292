"""`slurmft watch`: a live view of a run."""
