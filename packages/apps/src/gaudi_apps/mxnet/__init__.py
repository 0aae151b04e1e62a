"""SSD-ResNet34 in MXNet: configuration, plan, task and run of the program `ssd_mxnet_train`; nothing of TensorFlow."""
