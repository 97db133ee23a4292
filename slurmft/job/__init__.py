"""The door between the toolkit and the program of a job: what a process of a job may ask."""

from slurmft.job.job import Job, attach

__all__ = ["Job", "attach"]
