"""How long a run takes on another number of nodes: a model fitted to measured runs."""
