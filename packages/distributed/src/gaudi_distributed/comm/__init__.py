"""Communicate between ranks, through Horovod or tf.distribute."""
