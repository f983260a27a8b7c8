"""Leaderboards: many algorithms under many settings, on the same traces, splits, initial models and batches."""
