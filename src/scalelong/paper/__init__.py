"""The paper's tables and figures as experiments: small enough for a CPU, and at the paper's size for GPUs."""
