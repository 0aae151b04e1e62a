"""Choose the device, the precision and the processor cores of a rank."""
