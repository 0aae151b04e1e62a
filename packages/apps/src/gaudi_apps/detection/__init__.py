"""SSD-ResNet34: configuration, plan, task and run of the program `ssd_train`."""
