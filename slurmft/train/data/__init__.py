"""The data of ranks: tables of tokens on disk, batches in memory, the order of samples."""
