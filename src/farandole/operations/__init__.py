# The operations on arrays and objects: from what a user passes to requests of the engine, and back to results.
# Its files touch base, engine and world; they import no framework.
