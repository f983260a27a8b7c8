"""Where a run loses performance: causes are removed one by one and together, and the loss is divided among them."""
