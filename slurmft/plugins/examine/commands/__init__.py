"""The commands of the examiner: one module each."""
