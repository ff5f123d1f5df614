"""What the native kernels in the package are built with: `make kernels`."""
