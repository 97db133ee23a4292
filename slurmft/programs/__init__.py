"""Programs of the user's own: description, snapshot, environment, process."""
