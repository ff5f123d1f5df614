"""The validation of a GPU: `scripts/card-run` measures bridle on a GPU, part by part, in ten minutes.

`run` is the parent, which imports neither torch nor bridle, so that nothing that a part does to the device or to its
process harms another. `child` is a part's process. The other modules contain the measurements of the parts.
"""
