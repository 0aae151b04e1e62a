"""Image classification, as resnet_train and resnext_train do it."""
