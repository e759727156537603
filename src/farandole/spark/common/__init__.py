# What the estimators for PyTorch, Lightning and Keras share: stores, data, parameters, fitting, saving.
# Imports nothing.
