"""Speed and memory beside peers and beside the machine's limit, each figure a ratio measured in one run."""
