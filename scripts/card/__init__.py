"""The validation of a GPU: `scripts/card-run` measures what bridle does on one, part by part, in ten minutes.

`run` is the parent, which imports neither torch nor bridle, so that nothing that a part does to the device or to its
process harms another. `child` is a part's process. The other modules are what parts measure.
"""
