# The engine room: what an engine is, the native one, and the one in Python with the specification of every operation.
# Its files touch base, NumPy and the native library, which lies in _native beside them.
