"""The training loop, as each rank runs it: `trainer.run` is the page to read."""
