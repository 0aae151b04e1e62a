"""Records: TFRecord files of tf.train.Example messages, written by several processes, found and read by split."""
