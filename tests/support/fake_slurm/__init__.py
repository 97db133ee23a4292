"""A Slurm that is none: its commands over a folder, for tests whose subject is what slurmft does
with them. tests/slurm/contract.py holds it to what the real one does.

Every command imports this package: it stays empty.
"""
