"""Build of the C kernels in the package: `make kernels`."""
