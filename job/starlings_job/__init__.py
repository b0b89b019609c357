"""What is trained: the job's specification, its model cut into blocks, its data, checkpoints and export.

Only `model`, `prepare`, `importing` and `reference` import torch; all else runs on the owner's slim machine.
"""
