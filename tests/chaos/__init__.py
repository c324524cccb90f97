"""Tests what a training survives: kills, full disks, damaged checkpoints, other devices, NaN."""
