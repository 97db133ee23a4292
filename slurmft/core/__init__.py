"""What every other package builds on: options, configuration, files, texts, errors, permissions."""
