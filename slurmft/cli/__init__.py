"""The commands about any job: one module each, which parses, calls and prints.

The docstring of a module is the command's help, its first sentence the line in `slurmft --help`;
`parser()` has the command line, `main(argv)` carries it out and returns the exit code. Commands are
found by the entry points `slurmft.commands` (see `slurmft.core.plugins`).
"""
