"""What `experiments.sweep` is made of: the cells of a sweep and its table of progress."""
