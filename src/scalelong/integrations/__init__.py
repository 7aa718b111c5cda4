"""Ready parts for other libraries' training scripts."""
