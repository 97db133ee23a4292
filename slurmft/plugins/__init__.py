"""Plug-ins: all that the kernel runs without. Each is a folder of its own."""
