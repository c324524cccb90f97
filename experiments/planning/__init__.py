"""What `experiments.plan` is made of: topology, compiling, collectives, roofline, tables and report."""
