"""Build of the native kernels in the package: `make kernels`."""
