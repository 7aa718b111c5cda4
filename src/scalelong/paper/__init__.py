"""The paper's tables and figures as small experiments: a size that a CPU trains, and the paper's own for GPUs."""
