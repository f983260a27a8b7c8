"""What clients train on: samples, who holds which, which are contaminated, and which of them a client meets.

`data.datasets` has the samples, `data.partition` says who holds which, `data.contamination` mixes foreign samples into
them, and `data.samples` draws a client's batches.
"""
