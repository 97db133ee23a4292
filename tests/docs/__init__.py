"""The documentation tells the truth: what it shows is run, and what it names is there."""
