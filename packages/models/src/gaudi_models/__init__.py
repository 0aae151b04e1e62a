"""Networks in Keras: ResNet backbones and the single-shot detector. They know no loss, no suppression and no device."""
