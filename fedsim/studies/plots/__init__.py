"""Pictures and tables that compare finished runs."""
