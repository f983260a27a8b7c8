"""Tuning: trials as replicates of federations, successive halving, and a choice that accounts for noise."""
