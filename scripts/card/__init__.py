"""The validation of a GPU: `scripts/card-run` measures bridle on a GPU, part by part, in ten minutes.

`run` is the parent process and imports neither torch nor bridle. So a part that breaks the device or its own process
harms no other part. `child` runs in the process of one part. The other modules contain the measurements of the parts.
"""
