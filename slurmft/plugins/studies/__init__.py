"""Studies: grids of runs, and their evaluation by reports, comparisons and a scaling model."""
