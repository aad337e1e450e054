"""Every Triton program compiled for devices that need not be there: `python -m benchmarks.compiled`."""
