"""The version, on its own so that building and `--version` import nothing else."""

__version__ = "0.2.0"
