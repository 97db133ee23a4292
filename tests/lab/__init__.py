"""Real shared file systems, each with a server and two clients: what holds on them.

`python -m tests.lab glusterfs` sets one up, makes all checks and renews the tables in
docs/file-locks.md; `pytest --lab tests/lab` asserts that what slurmft believes of them is so. It
needs root and Debian's packages of the file systems; all of it runs in namespaces of its own, and
ends with the process that started it.
"""
