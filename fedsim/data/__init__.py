"""Training data: the samples, their partition over clients, contaminated samples, and the batches that clients draw.

`data.datasets` has the samples, `data.partition` says who holds which, `data.contamination` mixes foreign samples into
them, and `data.samples` draws a client's batches.
"""
