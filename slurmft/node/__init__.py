"""What the one task of a node does: rendezvous, torchrun, hardware, signals, watchdog."""
