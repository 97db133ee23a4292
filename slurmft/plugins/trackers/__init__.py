"""Metrics in TensorBoard, Weights & Biases and other trackers."""
