"""The commands of clusters elsewhere: one module each."""
