"""What `experiments.plan` is made of: chips, compiling, collectives, roofline, and the page."""
