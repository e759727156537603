# TensorFlow's data service on Spark.
# Imports nothing: compute_worker.py is a program.
