# What a job shows from outside its ranks: last operations, stacks, what a rank waits for.
# Touches nothing; the files of the room read memory files and texts.
