"""Starts runs in several processes on this machine, and has recipes for clusters."""
