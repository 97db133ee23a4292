"""The one task of a node: rendezvous, torchrun, hardware, signals, watchdog."""
