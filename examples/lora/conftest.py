"""Here so that pytest puts this folder on the path, and `adapters` need not be installed."""
