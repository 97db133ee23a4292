"""The run directory: its layout, records, attempts and logs, and how a run is found by name."""
