"""Random derivations of the grammar."""
