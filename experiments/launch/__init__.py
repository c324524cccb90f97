"""Starting a run in several processes: those of this machine, and recipes for clusters."""
