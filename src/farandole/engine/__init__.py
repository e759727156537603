# The engine interface, the native engine, and the engine in Python with the specification of every operation.
# Its files touch base, NumPy and the native library in _native.
