"""Networks in Keras: ResNet trunks and the single-shot detector. They know no loss, no suppression and no device."""
