"""slurmft: fine-tune Hugging Face transformers on Slurm clusters, from one command.

This package is two floors. The login floor (config, submit, follow) imports no torch; the compute
floor (train and what it needs) does. The run directory is all that passes between them.
"""

__version__ = "0.1.0"
