"""How a model computes: without padding, by fused layers, with adapters or a trimmed vocabulary."""
