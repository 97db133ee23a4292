"""What `references.py` compares: each module has the checks of one part of the table."""
