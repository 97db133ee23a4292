"""The commands of studies: one module each."""
