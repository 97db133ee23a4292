"""How ranks share a training: strategies, gradient communication, sharding, optimizers."""
