"""The half of the trainer that runs on the login node: options to a configuration, a look at data.

It imports no torch and nothing of the half that runs on ranks. Ranks read rows by the same code.
"""
