"""A judge of new strategies: is an advantage due to the mechanism, to tuning, or to the seeds?"""
