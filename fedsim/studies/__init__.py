"""Studies of many runs: recipes of papers, leaderboards, tables, pictures, statistics of results.

The simulator (`fedsim.run` and all below) imports nothing of this; `lint-imports` checks that.
"""
