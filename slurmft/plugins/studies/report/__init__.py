"""Reports: tables, plots and a page of what runs measured, beside what was published."""
