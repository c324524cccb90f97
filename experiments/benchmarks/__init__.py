"""What `experiments.benchmark` and `experiments.tpu_bundles` are made of."""
