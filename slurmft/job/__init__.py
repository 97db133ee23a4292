"""The door between the toolkit and the program of a job: what a process of a job may ask."""
