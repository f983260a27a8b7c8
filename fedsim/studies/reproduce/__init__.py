"""Reproduces the figures and tables of papers from recipes (YAML): run, measure, compare, draw, report."""
