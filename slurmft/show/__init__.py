"""Every word, line and table that a person sees of a run."""
