"""Planes run a stage program: today on PyTorch."""
