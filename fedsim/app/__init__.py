"""The user interface: command line, configurations, sweeps and recipes. PyTorch is imported only where a run begins."""
