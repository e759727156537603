# The data service: separate processes prepare the data of a training job with tf.data's service.
# Holds the modules of the contract.
"""Replaces `horovod.tensorflow.data` in scripts."""
