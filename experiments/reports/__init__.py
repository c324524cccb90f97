"""What `experiments.report` is made of: records read, compared and told."""
