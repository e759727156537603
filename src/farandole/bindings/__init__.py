# Shared by the bindings of frameworks: a call as data, compiled operations, Horovod's helpers, private names.
# Its files touch base, engine, world and operations; they load no framework.
