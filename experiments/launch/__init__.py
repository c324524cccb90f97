"""Starts runs in several processes on this machine, with recipes for clusters."""
