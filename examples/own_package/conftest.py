"""Here so that pytest puts this folder on the path, and `mypackage` need not be installed."""
