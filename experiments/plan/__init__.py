"""Plans of training steps on TPU chips, compiled without the chips."""
