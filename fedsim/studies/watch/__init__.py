"""`fedsim watch`: a local page with the curves of the runs in a folder, updated while they are computed."""
