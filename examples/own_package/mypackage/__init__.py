"""What fedsim lacks: a strategy with memory, an availability process, a shift. See docs/extending.md."""
