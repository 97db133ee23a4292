"""Studies: grids of runs, and their evaluation by reports with comparisons, and a scaling model."""
