"""Trains on five generated tasks, which test generalisation to longer inputs."""
