"""A file system whose flock() excludes on one node only, as on GPFS and Lustre: see lockfs.c."""

from tests.support.lockfs.lockfs import LockfsError, TwoNodes, missing

__all__ = ["LockfsError", "TwoNodes", "missing"]
