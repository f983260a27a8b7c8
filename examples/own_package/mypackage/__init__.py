"""What fedsim lacks: a strategy with memory, a local rule, an availability process, a shift. See docs/extending.md."""
