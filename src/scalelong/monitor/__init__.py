"""Monitor the stability of a training run: `scalelong.StabilityMonitor`, and `log.read_stability` for its log."""
