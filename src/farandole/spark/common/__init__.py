# What the estimators for PyTorch, Lightning and Keras share: stores, data, parameters, fitting, saving.
# Holds others and imports none of them.
