"""Attribution: causes are removed one by one and together, and a run's loss of performance is divided among them."""
