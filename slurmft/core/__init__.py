"""The ground of every other package: options, configuration, files, texts, errors, permissions."""
