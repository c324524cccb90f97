"""Five generated tasks that test whether a model generalises to longer inputs."""
