"""What a step trains on: rows of tokens as a function of the files, the seed and the step.

Nothing here knows of processes, devices or models, and there is no iterator whose state could be
lost.
"""
