# The data service: processes of their own prepare the data of a training job, through tf.data's service.
# Holds the modules of the contract.
"""Stands where a script has `horovod.tensorflow.data`."""
