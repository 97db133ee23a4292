"""Messages about the end, a failure or a hang of a job."""
